"""`docs/cluster.md` and `scripts/submit.sh`: what people copy must be what the code takes."""

from __future__ import annotations

import re
import shlex

import pytest

from specextend.cli.run import overrides, parse
from specextend.cluster import exits
from specextend.config import RunConfig
from tests.job.conftest import ROOT

TEXT = (ROOT / "docs" / "cluster.md").read_text().partition("## Every night")[0]
SHELL = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
COMMANDS = [
    match.replace("/opt/specextend", str(ROOT)).rstrip(" &")
    for block in SHELL
    for match in re.findall(r"(?:jobs/summarize\.py|scripts/submit\.sh) (.*)$", block.replace("\\\n", ""), re.MULTILINE)
]


@pytest.mark.parametrize("arguments", COMMANDS)
def test_the_job_takes_its_commands(arguments: str):
    """Files that exist, keys that are known, paths that a submitted job takes."""
    assert len(COMMANDS) == 3
    parsed = parse(shlex.split(arguments))
    config = RunConfig.load(ROOT / parsed.config, overrides(parsed), allow_relative=False)
    assert config.job.gpus_per_worker == 1


def test_every_exit_code_has_its_answer():
    """A scheduler that repeats what cannot succeed fills a night."""
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    page = (ROOT / "docs" / "input-output.md").read_text()
    rows = re.findall(r"^\| ([\d, ]+) \| ", page, re.MULTILINE)
    assert {int(code) for row in rows for code in row.split(",")} == codes


def test_the_service_leaves_the_job_its_grace_and_repeats_what_may_succeed():
    """After TimeoutStopSec it is killed, and a submission after Ray's 3 s; whatever is not named is started again."""
    [wait_s] = re.findall(r'"RAY_JOB_STOP_WAIT_TIME_S": "(\d+)"', (ROOT / "scripts" / "submit.sh").read_text())
    assert float(wait_s) > exits.GRACE_S
    [timeout] = re.findall(r"^TimeoutStopSec=(\d+)$", TEXT, re.MULTILINE)
    assert float(timeout) > exits.GRACE_S
    [final] = re.findall(r"^RestartPreventExitStatus=(.*)$", TEXT, re.MULTILINE)
    final_codes = {exits.EXIT_REFUSED, exits.EXIT_TOO_MANY_ERRORS, exits.EXIT_LOCKED, exits.EXIT_OTHER_RUN}
    assert {int(code) for code in final.split()} == final_codes
