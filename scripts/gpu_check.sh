#!/usr/bin/env bash
# Runs what only a GPU can prove: the gpu-marked tests, then the benchmark, in under 9 minutes. Results go to $OUT.
# Needs the models (`make models`) and torch with CUDA, transformers, pyarrow, pydantic, pyyaml, rich and pytest;
# neither ray nor flash-attn nor a network.
set -euo pipefail
cd "$(dirname "$0")/.."
OUT=${OUT:-out/gpu}
mkdir -p "$OUT"
export PYTHONPATH=. HF_HUB_OFFLINE=1
timeout 200 python3 -m pytest -m gpu tests/gpu -q --junit-xml="$OUT/tests.xml"
timeout 320 python3 jobs/bench.py compare --config configs/smollm2.yaml --documents examples/govreport.parquet \
  --per-bucket 2 --set target.device=cuda --set attention.backend=sdpa --json "$OUT/compare.json"
