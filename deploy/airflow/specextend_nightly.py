"""A night of summaries as a DAG of Airflow 3: copy it into the folder of DAGs, and change paths and
hours.

The task retries what another try mends (exit 1 and 75) and fails at once for what it does not. The
run's date is that of the schedule, so every retry resumes the same output. Checked offline only: no
Airflow has loaded it yet.
"""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timedelta

from airflow.exceptions import AirflowException, AirflowFailException
from airflow.sdk import dag, task

FOLDER = "/opt/specextend"
COMMAND = [
    ".venv/bin/specextend",
    "run",
    "--config",
    "/etc/specextend/nightly.yaml",
    "--log",
    "json",
]
CLUSTER = {"RAY_ADDRESS": "node1:6379", "RAY_AUTH_MODE": "token"}
"""The cluster of docs/cluster.md, of which Airflow's worker is a node; {} for one machine."""
FINAL = {
    2: "wrong configuration or input",
    3: "too many error rows",
    4: "at work already",
    5: "another run's folder",
}


@dag(schedule="0 20 * * *", start_date=datetime(2026, 11, 1), catchup=False, max_active_runs=1)
def specextend_nightly() -> None:
    """Summarise what is new or has changed since the nights before."""

    @task(retries=10, retry_delay=timedelta(minutes=5), execution_timeout=timedelta(hours=11))
    def summarize(day: str) -> None:
        """Run the job, and resume it in each retry."""
        with subprocess.Popen(
            [*COMMAND, "--run-date", day], cwd=FOLDER, env=os.environ | CLUSTER
        ) as job:
            try:
                code = job.wait()
            finally:
                # if Airflow ends the task: the job then commits what is done, and exits with 75
                job.terminate()
        if code in FINAL:
            raise AirflowFailException(f"exit {code}: {FINAL[code]}")
        if code:
            raise AirflowException(f"exit {code}: run again")

    summarize(day="{{ ds }}")


specextend_nightly()
