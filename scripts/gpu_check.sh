#!/usr/bin/env bash
# Runs what only a GPU can prove, in under nine minutes: benchmarks/README.md says what. Results go to $OUT, at most eight
# small files, of which summary.json says how each stage ended. The exit code is 1 if one failed, or if nothing ran.
# Needs torch with CUDA, transformers, triton, pydantic and pytest; neither models nor a network.
# `scripts/gpu_check.sh --device cpu --shapes tiny` tries all of it but the tests on a CPU.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_check --out "${OUT:-out/gpu}" "$@"
