#!/usr/bin/env bash
# Submits jobs/summarize.py to a Ray cluster, shows its log, and exits with the job's own code. Ray's CLI has only 0 and 1.
#
#   export RAY_ADDRESS=http://127.0.0.1:8265 RAY_AUTH_MODE=token
#   scripts/submit.sh --config llama3.1-8b-eagle3-a100 --input s3://bucket/reports/ --output s3://bucket/summaries/
#
# A job that was stopped by `ray job stop` has no code of its own and counts as 75, because it committed what was finished.
# A job that failed without a code never reached its driver or lost it, and counts as 1, as one does whose driver was killed.
set -euo pipefail
: "${RAY_ADDRESS:?set it to the address of the dashboard, as http://127.0.0.1:8265}"
job="specextend-$(date -u +%Y%m%dT%H%M%S)-$$"
ray job submit --submission-id "$job" --working-dir "$(dirname "$0")/.." \
    --runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "60"}}' \
    -- python jobs/summarize.py "$@" || true
token=
if [ "${RAY_AUTH_MODE:-}" = token ]; then token="$(ray get-auth-token)"; fi
python - "$RAY_ADDRESS/api/jobs/$job" 3<<<"$token" <<'EOF'
import json, os, sys, time, urllib.request

request = urllib.request.Request(sys.argv[1])
if token := os.fdopen(3).read().strip():
    request.add_header("Authorization", f"Bearer {token}")
while True:
    try:
        with urllib.request.urlopen(request) as answer:
            job = json.load(answer)
    except OSError as error:
        sys.exit(f"error: {sys.argv[1]} does not answer ({error}); if the job was taken, it goes on")
    if job["status"] not in ("PENDING", "RUNNING"):
        break
    time.sleep(5)  # the connection to the log was lost, but the job goes on
code = job["driver_exit_code"]
if code is None or not 0 <= code < 128:  # none, or a signal
    code = 75 if job["status"] == "STOPPED" else 1
sys.exit(code)
EOF
