#!/usr/bin/env bash
# Runs what only a GPU can prove, in under nine minutes: docs/benchmarks.md says what. Results go to $OUT, at most eight
# small JSON files, of which summary.json says how each stage ended.
# Needs torch with CUDA, transformers and triton, and for the stage of tests pytest, of which the last also needs pydantic;
# neither models nor a network. A package that is missing is named in the summary.
# `scripts/gpu_check.sh --device cpu --shapes tiny` tries all of it on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m specextend.bench.gpu_check --out "${OUT:-out/gpu}" "$@"
