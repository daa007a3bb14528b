"""`docs/cluster.md` and the schedulers' files of `deploy/`: what people copy must be what the code takes."""

import ast
import re
import shlex
import subprocess

import pytest
import yaml

from specextend.cluster import exits
from specextend.config import RunConfig
from specextend.folders import shipped_configs
from tests.job.conftest import ROOT, submitted, text_of

DEPLOY = ROOT / "deploy"
CLUSTER, _, REST = text_of("docs/cluster.md").partition("## Every night")
SERVICE = text_of("deploy/systemd/specextend.service")
PAGE = REST.partition("\n## ")[0]
NIGHTLY = "".join(re.findall(r"^```yaml\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
[(PREPARE, DRAFT)] = re.findall(r"^(specextend prepare draft \S+ --output (\S+))", CLUSTER, re.MULTILINE)
[NAME] = set(re.findall(r"--config (\S+a100)", CLUSTER))
PAIR = RunConfig.load(NAME)
OTHERS = {name for name in shipped_configs() if "-" in name} - {NAME}
FILES = [*(path for path in DEPLOY.rglob("*.*") if path.is_file()), *(DEPLOY / "cron").iterdir()]
FILES += [DEPLOY / "kuberay" / "Dockerfile", ROOT / "ray_cluster.yaml", ROOT / "scripts" / "submit.sh"]
COMMANDS = [
    match.rstrip(" &")
    for text in (CLUSTER, text_of("deploy/slurm/specextend.sh"))
    for match in re.findall(r"^(?:specextend run|scripts/submit\.sh) (.*)$", text.replace("\\\n", ""), re.MULTILINE)
]
FINAL = {exits.EXIT_REFUSED, exits.EXIT_TOO_MANY_ERRORS, exits.EXIT_LOCKED, exits.EXIT_OTHER_RUN}


DAG = ast.parse(text_of("deploy/airflow/specextend_nightly.py"))
CRON_JOB = yaml.safe_load(text_of("deploy/kubernetes/cronjob.yaml"))
POD = CRON_JOB["spec"]["jobTemplate"]["spec"]["template"]["spec"]
[CONTAINER] = POD["containers"]


def constant(name):
    """A constant of the DAG's file, which cannot be imported without Airflow."""
    [node] = [each for each in DAG.body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == name]
    return ast.literal_eval(node.value)


def commands():
    """The commands in the form of a shell."""
    [cron_line] = re.findall(r"^[\d*].*$", text_of("deploy/cron/specextend"), re.MULTILINE)
    return [
        cron_line.replace("\\%", "%"),
        shlex.join([*constant("COMMAND"), "--run-date", "2026-11-22"]),
        CONTAINER["args"][0],
        *re.findall(r"^(?:specextend run|scripts/submit.sh) .*", PAGE, re.MULTILINE),
    ]


@pytest.mark.parametrize("command", commands())
def test_the_job_takes_the_command(command, tmp_path):
    """Flags, keys and variables; the schedulers' files share the configuration of the page."""
    own = tmp_path / "nightly.yaml"
    own.write_text(NIGHTLY)
    command = command.replace("/etc/specextend/nightly.yaml", str(own))
    command = re.split(r"specextend run |submit\.sh ", command)[1].partition(" 2>>")[0]
    words = subprocess.run(["bash", "-c", f"printf '%s\\0' {command}"], capture_output=True, text=True, check=True)
    config = submitted(words.stdout.split("\0")[:-1])
    assert re.search(r"/\d{4}-\d\d-\d\d$", config.output.path)
    assert config.input.except_done_in == (config.output.path[:-10] + "*",)
    assert config.input.id_column == "id"
    assert (config.target.model, config.draft.model) == (PAIR.target.model, DRAFT)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_file_starts_what_the_page_starts(path):
    """Whoever goes from the page to a file, or on to another, prepares nothing else and finds the same models."""
    text = path.read_text()
    assert {*re.findall(r"--config[\s\",]+([\w./-]+)", text)} <= {NAME, "/etc/specextend/nightly.yaml"}
    assert [name for name in OTHERS if name in text] == []
    assert {*re.findall(r"specextend prepare draft \S+ --output \S+", text)} <= {PREPARE}
    assert "hf download" not in text
    assert ("ray job submit --" in text) == (path.name == "submit.sh"), "the script keeps the job's own code"
    stops = r"RAY_JOB_STOP_WAIT_TIME_S\W+(\d+)|TimeoutStopSec=(\d+)|terminationGracePeriodSeconds: (\d+)|TERM@(\d+)"
    [stop_s] = re.findall(r"(\d+) s\s+before SIGKILL", CLUSTER)
    assert {seconds for found in re.findall(stops, text) for seconds in found if seconds} <= {stop_s}
    assert {*re.findall(r"RAY_ADDRESS\W+(node\S+?:\d+)", text)} <= {"node1:6379"}


def test_what_runs_on_many_nodes_joins_them_and_has_what_the_page_installs():
    """Without RAY_ADDRESS cron's and Airflow's nights used one machine of four."""
    assert PAIR.draft.model == DRAFT
    assert PREPARE in text_of(f"configs/{NAME}.yaml")
    joins = {"RAY_ADDRESS": "node1:6379", "RAY_AUTH_MODE": "token"}
    assert constant("CLUSTER") == joins
    assert {*text_of("deploy/cron/specextend").splitlines()} >= {f"{key}={joins[key]}" for key in joins}
    [extras] = re.findall(r"any\.whl(\[.*?\])", CLUSTER)
    image = text_of("deploy/kuberay/Dockerfile")
    launcher = "\n".join(yaml.safe_load(text_of("ray_cluster.yaml"))["setup_commands"])
    assert f"ARG EXTRAS={extras.strip('[]')}\n" in image
    assert f"any.whl{extras}" in launcher
    assert PREPARE in image
    assert PREPARE in launcher


[RULE] = CRON_JOB["spec"]["jobTemplate"]["spec"]["podFailurePolicy"]["rules"]
[CODES] = re.findall(r"^RestartPreventExitStatus=(.*)$", SERVICE, re.MULTILINE)


@pytest.mark.parametrize("codes", [constant("FINAL"), RULE["onExitCodes"]["values"], map(int, CODES.split())])
def test_a_scheduler_repeats_what_may_succeed(codes):
    """A retry of a wrong configuration fills the night with the same line."""
    assert {*codes} == FINAL


def test_kubernetes_fails_the_job_and_leaves_it_its_grace():
    """A failure policy asks for pods that are never restarted; a shell would not pass SIGTERM on."""
    assert (CRON_JOB["apiVersion"], CRON_JOB["kind"]) == ("batch/v1", "CronJob")
    assert CRON_JOB["spec"]["concurrencyPolicy"] == "Forbid"
    assert (RULE["action"], POD["restartPolicy"]) == ("FailJob", "Never")
    assert CONTAINER["args"][0].startswith("exec ")
    assert f"image: {CONTAINER['image']}" in text_of("deploy/kuberay/rayjob.yaml")


@pytest.mark.parametrize("arguments", COMMANDS)
def test_a_submitted_job_takes_its_commands(arguments, monkeypatch):
    """Files that exist, keys that are known, paths that a submitted job takes."""
    assert len(COMMANDS) == 3
    monkeypatch.chdir(ROOT)
    assert submitted(shlex.split(arguments)).job.gpus_per_worker == 1


def test_every_exit_code_has_its_answer():
    """A scheduler that repeats what cannot succeed fills a night."""
    codes = {value for name, value in vars(exits).items() if name.startswith("EXIT_")}
    page = text_of("docs/output.md")
    rows = re.findall(r"^\| ([\d, ]+) \| ", page, re.MULTILINE)
    assert {int(code) for row in rows for code in row.split(",")} == codes


def test_the_service_leaves_the_job_its_grace():
    """After TimeoutStopSec, which is that of all files, it is killed."""
    [timeout] = re.findall(r"^TimeoutStopSec=(\d+)$", SERVICE, re.MULTILINE)
    assert float(timeout) > exits.GRACE_S
