"""`docs/cluster.md` and the schedulers' files of `deploy/`: what people copy must be what the code takes."""

import ast
import re
import shlex
import subprocess

import pytest
import yaml

from specextend.cluster import exits
from tests.job.conftest import ROOT, submitted

DEPLOY = ROOT / "deploy"
CLUSTER, _, REST = (ROOT / "docs" / "cluster.md").read_text().partition("## Every night")
SERVICE = (DEPLOY / "systemd" / "specextend.service").read_text()
PAGE = REST.partition("\n## ")[0]
COMMANDS = [
    match.replace("/opt/specextend", str(ROOT)).rstrip(" &")
    for text in (CLUSTER, (DEPLOY / "slurm" / "specextend.sh").read_text())
    for match in re.findall(r"^(?:specextend run|scripts/submit\.sh) (.*)$", text.replace("\\\n", ""), re.MULTILINE)
]
FINAL = {exits.EXIT_REFUSED, exits.EXIT_TOO_MANY_ERRORS, exits.EXIT_LOCKED, exits.EXIT_OTHER_RUN}


DAG = ast.parse((DEPLOY / "airflow" / "specextend_nightly.py").read_text())
CRON_JOB = yaml.safe_load((DEPLOY / "kubernetes" / "cronjob.yaml").read_text())
POD = CRON_JOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def constant(name):
    """A constant of the DAG's file, which cannot be imported without Airflow."""
    [node] = [each for each in DAG.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name]
    return ast.literal_eval(node.value)


def commands():
    """The commands in the form of a shell."""
    [cron_line] = re.findall(r"^[\d*].*$", (DEPLOY / "cron" / "specextend").read_text(), re.MULTILINE)
    return [
        cron_line.replace("\\%", "%"),
        shlex.join([*constant("COMMAND"), "--run-date", "2026-11-22"]),
        CONTAINER["args"][0],
        *re.findall(r"^specextend run .*", PAGE, re.MULTILINE),
    ]


@pytest.mark.parametrize("command", commands())
def test_the_job_takes_the_command(command, monkeypatch, tmp_path):
    """Flags, keys and variables; the schedulers' files share the configuration of the page."""
    for name in ("CORPUS", "SUMMARIES"):
        monkeypatch.setenv(name, f"/data/{name.lower()}")
    configuration = "".join(re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
    own = tmp_path / "nightly.yaml"
    models = {"target": {"model": "owner/t"}, "decoding": {"mode": "autoregressive"}}
    own.write_text(yaml.safe_dump(models) + configuration)
    command = command.replace("/etc/specextend/nightly.yaml", str(own)).replace("/home/ray/specextend", str(ROOT))
    command = command.partition("specextend run ")[2].partition(" 2>>")[0]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    config = submitted(words.stdout.split("\0")[:-1])
    assert re.search(r"/\d{4}-\d\d-\d\d$", config.output.path)
    assert config.input.except_done_in == (config.output.path[:-10] + "*",)
    assert config.input.id_column == "id"


def test_airflow_repeats_what_may_succeed():
    """A retry of a wrong configuration fills the night with the same line."""
    compile(DAG, "specextend_nightly.py", "exec")
    assert set(constant("FINAL")) == FINAL
    assert set(constant("PATHS")) == {"CORPUS", "SUMMARIES"}


def test_kubernetes_repeats_what_may_succeed_and_leaves_the_job_its_grace():
    """A failure policy asks for pods that are never restarted; a shell would not pass SIGTERM on."""
    assert (CRON_JOB["apiVersion"], CRON_JOB["kind"]) == ("batch/v1", "CronJob")
    assert CRON_JOB["spec"]["concurrencyPolicy"] == "Forbid"
    [rule] = CRON_JOB["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
    assert rule["action"] == "FailJob"
    assert set(rule["onExitCodes"]["values"]) == FINAL
    assert POD["restartPolicy"] == "Never"
    assert POD["terminationGracePeriodSeconds"] > exits.GRACE_S
    assert CONTAINER["args"][0].startswith("exec ")
    assert f"image: {CONTAINER['image']}" in (DEPLOY / "kuberay" / "rayjob.yaml").read_text()


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_submitted_job_takes_its_commands(arguments, monkeypatch):
    """Files that exist, keys that are known, paths that a submitted job takes."""
    assert len(COMMANDS) == 3
    monkeypatch.chdir(ROOT)
    assert submitted(shlex.split(arguments)).job.gpus_per_worker == 1


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
    [timeout] = re.findall(r"^TimeoutStopSec=(\d+)$", SERVICE, re.MULTILINE)
    assert float(timeout) > exits.GRACE_S
    [final] = re.findall(r"^RestartPreventExitStatus=(.*)$", SERVICE, re.MULTILINE)
    assert {int(code) for code in final.split()} == FINAL
