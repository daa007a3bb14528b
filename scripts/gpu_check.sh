#!/usr/bin/env bash
# Runs what only a GPU can prove, in under eight minutes: benchmarks/README.md says what. Results go to $OUT as JSON. The
# exit code is 1 if a kernel that runs there is wrong, or a part fails.
# Needs torch with CUDA, transformers and triton, and pytest for its first two parts; neither models nor a network.
# `scripts/gpu_check.sh --device cpu --shapes tiny` tries all of it on a CPU, where tests are only collected.
set -euo pipefail
cd "$(dirname "$0")/.."
export PYTHONPATH=. PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
exec "${PYTHON:-python3}" -m benchmarks.gpu_check --out "${OUT:-out/gpu}" "$@"
