#!/bin/bash
#SBATCH --nodes=4 --ntasks-per-node=1 --gpus-per-node=8 --cpus-per-task=96 --exclusive
#SBATCH --time=12:00:00 --requeue --signal=B:TERM@60
# Starts a Ray cluster for the length of the allocation, runs or resumes, and requeues what was interrupted. It ends its
# own processes only: `ray stop`, with which Ray's `symmetric-run` ends, ends every Ray process of the account on a node.
# Each node has done step 1 of docs/cluster.md; export HF_TOKEN before sbatch, which hands the environment on.
set -euo pipefail
source /opt/specextend/.venv/bin/activate
export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH="$HOME/.ray/auth_token" RAY_USAGE_STATS_ENABLED=0
export RAY_TMPDIR="/tmp/$SLURM_JOB_ID" # short: socket paths end at 107 characters
first="$(hostname)"
RAY_ADDRESS="$(hostname --ip-address | cut -d ' ' -f 1):6379"
srun --overlap --nodes=1 --ntasks=1 --nodelist="$first" \
    ray start --head --block --node-ip-address="${RAY_ADDRESS%:*}" --port=6379 --dashboard-host=127.0.0.1 &
export RAY_ADDRESS
until ray status > /dev/null 2>&1; do sleep 2; done
if [ "$SLURM_NNODES" -gt 1 ]; then
    srun --overlap --nodes=$((SLURM_NNODES - 1)) --ntasks=$((SLURM_NNODES - 1)) --exclude="$first" \
        ray start --address="$RAY_ADDRESS" --block &
fi
specextend run --config llama3.1-8b-eagle3-a100 \
    --input /shared/reports --output /shared/summaries --set job.workers=32 &
driver=$!
trap 'kill -TERM "$driver"' TERM # 60 s before the end of the allocation
code=0
wait "$driver" || code=$?
while kill -0 "$driver" 2> /dev/null; do code=0; wait "$driver" || code=$?; done
if [ "$code" -eq 75 ]; then scontrol requeue "$SLURM_JOB_ID"; fi
exit "$code"
