"""What SECURITY.md promises; `test_pages.py` holds its list to these tests."""

import ast
import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import tempfile
import tomllib
import unicodedata
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import chain
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from specextend.core import printable
from tests.job.conftest import (
    CONFIG,
    LONGEST_S,
    ROOT,
    TEXT,
    call,  # noqa: F401
    dying_command,
    listening,
    on,
    read_json,
    rows,
    specextend,
    wait_for_pause,
)
from tests.models.conftest import edit_json

SOURCES = [path for folder in ("specextend", "jobs", "scripts") for path in sorted((ROOT / folder).rglob("*.py"))]
MODELS = ROOT / ".models" / "tiny-random"
SECRETS = {
    "AWS_ACCESS_KEY_ID": "AKIACANARYCANARY1234",
    "AWS_SECRET_ACCESS_KEY": "canary/secret+Q8mYw0pZt5xJ3vBn",
    "AWS_SESSION_TOKEN": "canary-session-R4kLd9sTq2",
    "HF_TOKEN": "hf_canaryUvWxYz0123456789",
}
NAMES = [
    "\x1b]0;owned\x07\x1b[2J",
    "../../../escaped",
    "/tmp/specextend-escaped",
    "C:\\escaped",
    "$(touch escaped)`touch escaped`",
    "<script>alert(1)</script>",
    "line\nbreak\x00zero",
    "s3://elsewhere/escaped",
    "a\u2028b\u2029c\u0085d\u202e\u2066e\u200f",
    "[red]x[/red] :smile: ![x](http://evil.example/x.png)",
]
"""Document ids as somebody would choose them who wants out of the output folder, or into a terminal or a page."""
FAILED = [
    "<img src=//evil.example>|\x1b[2J\n\n# Owned\u202e",
    "../null",
    "![x](//evil.example)",
    "`x` | [a](javascript:b)",
]
"""Ids of documents that cannot be done; the first of each class stands in the report."""
UNSAFE = frozenset(("Cc", "Cf", "Co", "Cs", "Zl", "Zp"))
"""Categories of characters that control, hide or reorder."""
CALLS_THAT_RUN_DATA = """eval exec compile __import__ os.system os.popen pickle.load pickle.loads pickle.Unpickler
    cloudpickle.load cloudpickle.loads dill.load dill.loads marshal.load marshal.loads shelve.open torch.load
    joblib.load numpy.load np.load yaml.unsafe_load yaml.full_load pandas.read_pickle"""


@dataclass(frozen=True)
class Ran:
    """A run as a user starts it, with secrets in its environment, and what was seen of it."""

    folder: Path
    """Holds `in/`, `out/`, `home/`, Ray's `logs/` and what it printed."""
    addresses: frozenset[str]
    """That any of its processes listened on."""
    token: str
    """Of its Ray."""

    @property
    def output(self):
        return self.folder / "out"


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """Hostile names and texts through the tiny pair; Ray as the job makes it, not as tests have it."""
    with tempfile.TemporaryDirectory(prefix="sx", dir="/tmp", ignore_cleanup_errors=True) as temporary:
        yield run_hostile(tmp_path_factory.mktemp("hostile"), Path(temporary))


def run_hostile(folder, temporary):
    """Run to the end, with a look at its processes in the middle; the paths of sockets must stay short."""
    (folder / "home").mkdir()
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "HF_"))}
    own = {"HOME": str(folder / "home"), "RAY_TMPDIR": str(temporary), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    with (folder / "stdout").open("w") as stdout, (folder / "stderr").open("w") as stderr:
        process = subprocess.Popen(
            # bad rows are the first part, before there is any Ray
            dying_command("SIGSTOP", 2, "--config", CONFIG, *hostile_corpus(folder)),
            env=clean | own | SECRETS,
            cwd=ROOT,
            stdout=stdout,
            stderr=stderr,
        )
    try:
        wait_for_pause(process)
        driver = psutil.Process(process.pid)
        addresses = frozenset(listening(driver))
        token = token_of(driver)
        shutil.copytree(temporary, folder / "logs", ignore=shutil.ignore_patterns("sockets"))  # they go with it
        process.send_signal(signal.SIGCONT)
        assert process.wait(LONGEST_S) == 0, (folder / "stderr").read_text()
    finally:
        process.terminate()
        process.send_signal(signal.SIGCONT)
        process.wait(LONGEST_S)
    assert not [*temporary.iterdir()], "nothing is left of its Ray"
    return Ran(folder, addresses, token)


def hostile_corpus(folder):
    """Arguments of a run over every name, once as an id and once in a passthrough column; four rows are errors."""
    texts = [f"{name}<|im_end|></s> {TEXT * (40 if row else 1)}" for row, name in enumerate(NAMES)]
    columns = {"name": [*NAMES, *FAILED], "other\x1b[2J": [*reversed(NAMES), *FAILED]}
    path = folder / "in" / "%2E%2E%2F%2E%2E%2Fescaped;$(touch escaped)\x1b[2J\u202e.parquet"
    path.parent.mkdir()
    pq.write_table(pa.table({"text": [*texts, None, "", None, ""], **columns}), path)
    settings = ["input.id_column=name", r'input.passthrough=["other\x1b[2J"]', "job.commit_every_s=0"]
    settings += ["job.max_error_fraction=0.5", "decoding.max_batch_size=1", "decoding.max_new_tokens=64"]
    return on(path.parent, folder / "out", *settings)


def token_of(driver):
    """The token that its Ray was started with."""
    for child in driver.children(recursive=True):
        with suppress(psutil.NoSuchProcess):  # it may have ended
            if child.name() == "raylet":
                return child.environ()["RAY_AUTH_TOKEN"]
    raise AssertionError("no raylet")


def contents(folder):
    """Every file, a Parquet file as the text of its rows and metadata: compressed, it would hide what it holds."""
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        yield path, path.read_bytes()
        if path.suffix == ".parquet":
            table = pq.read_table(path)
            yield path, repr((table.to_pylist(), table.schema.metadata, table.schema)).encode()


# Models and configurations


class Payload:
    """Runs a command when it is unpickled."""

    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.system, (f"touch {self.canary}",)


@pytest.mark.parametrize("key, name", [("target.model", "pytorch_model.bin"), ("draft.model", "model.safetensors")])
def test_a_pickle_is_refused_before_it_is_opened(call, tmp_path, key, name):  # noqa: F811
    """Unpickling runs code; under the name of safetensors, too."""
    shutil.copytree(MODELS / "target", tmp_path / "model", ignore=shutil.ignore_patterns("*.safetensors*"))
    (tmp_path / "model" / name).write_bytes(pickle.dumps({"weight": Payload(tmp_path / "canary")}))
    output = tmp_path / "out"
    assert "pickle" in call("--config", CONFIG, "--output", output, "--set", f"{key}={tmp_path / 'model'}").line()
    assert not (tmp_path / "canary").exists()
    assert not output.exists()


def test_code_inside_a_models_folder_is_not_run(call, tmp_path):  # noqa: F811
    """`auto_map` asks for it; a model is data."""
    folder = tmp_path / "model"
    shutil.copytree(MODELS / "target", folder)
    code = f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\n"
    for name in ("modeling.py", "configuration.py", "tokenization.py"):
        (folder / name).write_text(code)
    names = {"AutoConfig": "configuration.Own", "AutoModelForCausalLM": "modeling.Own"}
    edit_json(folder / "config.json", auto_map=names)
    edit_json(folder / "tokenizer_config.json", auto_map={"AutoTokenizer": ["tokenization.Own", None]})
    ended = specextend("plan", "--config", CONFIG, "--set", f"target.model={folder}")
    assert ended.code in (0, 2), ended.stderr
    assert not (tmp_path / "canary").exists()


def test_a_configuration_runs_nothing(call, tmp_path):  # noqa: F811
    """YAML knows tags that call functions; ours does not."""
    path = tmp_path / "run.yaml"
    path.write_text(f"input: !!python/object/apply:os.system ['touch {tmp_path / 'canary'}']\n")
    assert call("--config", path).line()
    assert not (tmp_path / "canary").exists()


def calls(path):
    """Every call of a file with where it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", node


def test_the_code_has_no_way_to_run_what_it_reads():
    """No unpickling, no `eval`, no shell; every model is loaded with remote code off, in so many words."""
    for where, node in chain.from_iterable(map(calls, SOURCES)):
        name = ast.unparse(node.func)
        keywords = {keyword.arg: keyword.value for keyword in node.keywords}
        assert name not in CALLS_THAT_RUN_DATA.split(), f"{where} calls {name}: read data as data"
        assert not (isinstance(keywords.get("shell"), ast.Constant) and keywords["shell"].value), f"{where}: no shell"
        if re.fullmatch(r"Auto\w+\.from_pretrained", name):
            told = keywords.get("trust_remote_code")
            assert getattr(told, "value", None) is False, f"{where} must say trust_remote_code=False"


# What a run leaves, and who may talk to it


@pytest.mark.slow
def test_no_name_from_the_data_becomes_a_file_name(ran):
    """Ids, paths and columns are values: every file has a name of ours, and nothing lies outside the output folder."""
    hexes = r"[0-9a-f]{8}"
    ours = rf"""_SUCCESS|report\.(json|md|html)|(summaries|errors)/part-\d{{5}}\.parquet|_run/manifest\.json
        |_run/(plan|selection)\.parquet|_run/attempts/{hexes}\.json|_run/parts/part-{hexes}-\d{{6}}\.parquet"""
    for path in ran.output.rglob("*"):
        name = path.relative_to(ran.output).as_posix()
        assert path.is_dir() or re.fullmatch(ours, name, re.VERBOSE), f"{name} is no name of ours"
    assert {path.name for path in ran.folder.iterdir()} == {"in", "out", "home", "logs", "stdout", "stderr"}
    assert not Path("/tmp/specextend-escaped").exists()
    assert not list(ROOT.glob("*escaped*"))
    assert [row["doc_id"] for row in rows(ran.output / "summaries")] == NAMES, "and ids arrive as they were"
    assert [row["doc_id"] for row in rows(ran.output / "errors")] == FAILED


@pytest.mark.slow
def test_no_secret_of_the_environment_is_written(ran):
    """Not into summaries, manifest, attempts or report, not to the terminal, not into Ray's logs."""
    assert list((ran.folder / "logs").rglob("*.log")), "Ray's logs are looked at"
    for path, content in contents(ran.folder):
        for name, secret in {**SECRETS, "RAY_AUTH_TOKEN": ran.token}.items():
            assert secret.encode() not in content, f"{name} stands in {path}"


@pytest.mark.slow
def test_a_local_run_is_reached_from_this_machine_alone_and_with_a_token(ran):
    """Ray runs what reaches its ports: loopback, and a token of this run that lies in no file."""
    assert ran.addresses
    assert ran.addresses <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert re.fullmatch(r"[0-9a-f]{64}", ran.token)
    assert not (ran.folder / "home" / ".ray").exists()


def unsafe(text):
    """The characters in it that no output may hold, line ends left out."""
    return {character for character in text if unicodedata.category(character) in UNSAFE} - {"\n"}


@pytest.mark.slow
def test_names_and_texts_cannot_drive_a_terminal(ran):
    """A document that is shown is not a document that clears the screen, or writes a line of the log."""
    shown = (ran.folder / "stdout").read_text()
    assert "drawn at random:" in shown
    shown += (ran.folder / "stderr").read_text()
    assert unsafe(shown) == set()
    assert not any(line.startswith(("break", "# Owned")) for line in shown.splitlines())
    for name in FAILED:
        assert f"document {printable(name)} failed: " in shown


@pytest.mark.slow
def test_nothing_in_the_report_is_more_than_text(ran):
    """Reports are read in browsers: an id that is an image would tell its author who reads it."""
    html = (ran.output / "report.html").read_text(encoding="utf-8")
    assert unsafe(html) == set()
    assert "could not be made" not in html
    assert "<script" not in html
    assert "<img" not in html
    report = read_json(ran.output / "report.json")
    assert {error["example_doc_id"] for error in report["errors"]} <= set(FAILED), "and programs get ids as they are"


def test_an_id_that_is_refused_cannot_either(call, tmp_path):  # noqa: F811
    """An error names what is wrong, which comes from the data."""
    pq.write_table(pa.table({"text": ["a", "b"], "name": [NAMES[0]] * 2}), tmp_path / "in.parquet")
    ended = call("--config", CONFIG, *on(tmp_path / "in.parquet", tmp_path / "out", "input.id_column=name")).exits(2)
    assert "owned" in ended.stderr
    assert unsafe(ended.stderr) == set()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--set", f"tree.{NAMES[-2]}=1"],
        ["--set", f"target.model=/no/{NAMES[-2]}"],
        ["--set", f"prompt.system={NAMES[-2]}", "--set", f"input.id_column={NAMES[-2]}"],
        ["--input", f"/no/{NAMES[0]}"],
        ["--output", f"/proc/{NAMES[-2]}"],
        ["--output", "/tmp/\udcff"],
        ["--config", "/tmp/\udcff"],
    ],
    ids=range(7),
)
@pytest.mark.parametrize("log", ["text", "json"])
def test_no_value_of_the_command_line_can(call, tmp_path, arguments, log):  # noqa: F811
    """Scripts build commands out of file names; whatever is wrong with one is said in one line."""
    ended = call("--config", CONFIG, *on(ROOT / "examples" / "demo", tmp_path / "out"), *arguments, "--log", log)
    assert ended.code in (1, 2), ended.stderr
    assert ended.stderr.endswith("\n")
    assert unsafe(ended.stderr) == set()
    assert len(ended.stderr.splitlines()) == 1
    assert log == "text" or json.loads(ended.stderr)["event"] == "error"


# Dependencies


LINES = (ROOT / "constraints.txt").read_text().splitlines()
PINS = {
    canonicalize_name(name): Version(version)
    for name, version in (line.split("==") for line in LINES if line and not line.startswith("#"))
}


def declared():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [Requirement(line) for line in [*project["dependencies"], *extras["dev"], *extras["docs"]]]


def installed():
    """Name and version of what is declared and comes along with it, and whether that very version is asked for."""
    seen = set()
    queue = declared()
    while queue:
        requirement = queue.pop()
        name = canonicalize_name(requirement.name)
        asked = name, frozenset(requirement.extras)
        if asked in seen:
            continue
        seen.add(asked)
        found = metadata.distribution(name)
        yield name, Version(found.version), any(each.operator == "==" for each in requirement.specifier)
        for more in map(Requirement, found.requires or ()):
            if more.marker is None or any(
                more.marker.evaluate({"extra": extra}) for extra in ("", *requirement.extras)
            ):
                queue.append(more)


def test_every_dependency_of_a_dependency_is_pinned():
    """`make setup` installs what was tested, and nothing that appeared since. What only one version of another asks for
    by exact version (CUDA's libraries by torch) is pinned with that.
    """
    loose = {name for name, _, is_exact in installed() if name not in PINS and not is_exact}
    assert not loose, f"pin in constraints.txt: {', '.join(sorted(loose))}"


def test_what_is_installed_is_what_is_pinned():
    """A test that passed with other versions says nothing."""
    others = {name: version for name, version, _ in installed() if name in PINS and version.public != str(PINS[name])}
    assert not others, f"constraints.txt has other versions of {others}; make setup installs them"


def test_dependencies_have_a_range_that_holds_the_pin():
    """The range is what a library user gets, the pin what CI runs: they must not contradict each other."""
    for requirement in declared():
        assert any(each.operator == ">=" for each in requirement.specifier), f"{requirement}: from which version?"
        assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, f"{requirement} is not the pin"


def test_the_wheel_of_torch_for_cuda_can_be_installed_with_the_pins():
    """CI installs its twin for CPUs, which requires neither triton nor CUDA's libraries, so its record is read."""
    wheel = json.loads((ROOT / "tests/install/cuda_requirements.json").read_text())
    assert wheel["torch"] == str(PINS["torch"]), "record it: scripts/cuda_requirements.py"
    for requirement in map(Requirement, wheel["requires_dist"]):
        if requirement.marker is None or requirement.marker.evaluate({"extra": "", "platform_system": "Linux"}):
            assert PINS[canonicalize_name(requirement.name)] in requirement.specifier, requirement
    others = {name: version for name, version in wheel["cuda"].items() if PINS.get(name) != Version(version)}
    assert not others, "pin in constraints.txt what pip resolves"
