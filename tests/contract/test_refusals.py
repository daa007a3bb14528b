"""What a user can get wrong: said in one line, exit 2, before a model is loaded, and nothing is written."""

import json
import platform
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants

from tests.damage import damage
from tests.job.conftest import (
    CONFIG,
    LONGEST_S,
    ROOT,
    command,
    dying_command,
    end_of,
    environment,
    on,
    read_json,
    sets,
    specextend,
    summarize,
    wait_for,
    write_corpus,
)
from tests.tables import cases


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(
        tmp_path / "in" / "a.parquet",
        ["one", "two"],
        doc=["a", "b"],
        same=["x", "x"],
        none=["x", None],
        many=[["x"], None],
        doc_year=[2026, 2026],
        meta=[{"land": "fr"}, None],
    )


@pytest.fixture
def given(corpus, tmp_path):
    """Arguments of a run over the corpus."""
    return ["--config", CONFIG, *on(corpus, tmp_path / "out", "input.id_column=doc")]


@pytest.fixture
def refused(call, given, tmp_path):
    """Refuses the run with further arguments, in a line that says something."""

    def refused(said, *arguments):
        line = call(*given, *arguments).line()
        assert line.startswith("error: ")
        assert said in line
        assert not (tmp_path / "out").exists(), "nothing may be written"

    return refused


@pytest.mark.parametrize(
    "settings, said",
    [
        *cases(r"""
        input.text_column=body -> body
        input.id_column=same -> x
        input.id_column=none -> none
        'input.passthrough=[attempts]' -> input.passthrough names attempts, already a column of summaries
        output.column=same 'input.passthrough=[same]' -> output.column and input.passthrough both name same
        output.column=key -> output.column names key, already a column of the results
        'input.passthrough=[message, message_]' -> input.passthrough names message_, already a column of error rows
        input.options_column=doc -> doc
        tree.nods=5 -> did you mean nodes?
        job.workers=99999999999999999999 -> job.workers must be at most 10000
        "prompt.instruction='{{ document }} and {{ document }}'" -> prompt.instruction
        target.model=/nowhere/at/all -> /nowhere/at/all does not exist
        target.model=/nowhere/at/all "prompt.instruction='{{ meta.lnd }}'" -> it has land; did you mean land?
        draft.model=/nowhere/at/all -> /nowhere/at/all
        draft.kind=eagle draft.model=models/smollm2-135m-eagle -> does not fit target
        'output.schema={worker: string}' -> output.schema names worker, already a column of the results; rename
        'output.schema={Message: string}' -> output.schema names Message, already a column of the results
        'output.schema={summary: string}' -> output.schema and output.column both name summary
        'output.schema={same: string}' 'input.passthrough=[same]'
            -> input.passthrough and output.schema both name same; rename the field
        decoding.max_new_tokens=100000 -> decoding.max_new_tokens or prompt.max_prompt_tokens: the template takes
        prompt.max_prompt_tokens=3 -> tokens of the 3 that max_new_tokens 24 leaves for the prompt
        decoding.cache_gib=0.002 -> decoding.cache_gib is 0.002, but a prompt and its output may take
        job.cpus_per_worker=4096 -> job.cpus_per_worker is 4096 but this machine has
        attention.backend=flash -> attention.backend flash
        'tasks=[{name: a, output: {schema: {kind: x | y}, column: text}}, {name: b, output: {column: kind}}]'
            -> the column kind would be made twice
        'output.schema={closed: boolean, said: string}' output.column=answer decoding.max_new_tokens=6
            -> decoding.max_new_tokens is 6, and the shortest answer of output.schema takes about
        target.device=cuda -> unknown key target.device; known keys are model, adapter, dtype, quantize
        "output.rules={a b: summary = ''}" -> output.rules: name 'a b' with letters
        'output.rules={short: length(summary) <}' -> output.rules.short 'length(summary) <' cannot be used (syntax
        'output.rules={short: count(summary) > 1}' -> count() is not allowed
        'output.rules={short: 1 = 1}' -> names no column
        'output.rules={short: length(sumary) < 9}' -> output.rules.short: there is no column 'sumary'
        "output.rules={known: same = 'x'}" -> no column 'same' in the answers or input.passthrough
        'output.rules={early: started_at IS NULL}' -> no column 'started_at'
        'input.passthrough=[doc_year]' 'output.rules={odd: doc_year = 2026 AND summary > make_date(year(summary))}'
            -> not fit its columns
        'input.passthrough=[doc_year]' "output.rules={odd: \"doc_year > 'x'::INT\"}" -> does not fit its columns
        'output.schema={kind: audit | budget}' output.column=answer 'input.gold={kid: same}'
            -> answers have no field 'kid'; did you mean kind?
        'output.schema={kind: audit | budget}' output.column=answer 'input.gold={kind: sam}'
            -> no column 'sam' (input.passthrough)
        'output.schema={kind: audit | budget}' output.column=answer 'input.gold={kind: many}' -> many is list<
    """),
        pytest.param(
            "job.gpus_per_worker=1",
            "job.gpus_per_worker is 1 but this machine has",
            marks=pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has the GPU that is asked for"),
        ),
    ],
)
def test_a_wrong_value_is_named(refused, settings, said):
    """Ten thousand documents later is too late to find a typing error."""
    refused(said, *sets(*shlex.split(settings)))


@pytest.mark.parametrize("path", ["nowhere.parquet", "empty", "*.nothing", "broken.parquet"])
def test_an_input_without_files_is_named(refused, tmp_path, path):
    """A mistyped path must not become a run over nothing that succeeds; nor what a failed export left there."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.parquet").write_bytes(b"PAR1 and nothing more")
    refused(path, "--input", tmp_path / path)


@pytest.mark.parametrize("command", ["call", "plan"])
def test_a_file_that_breaks_off_is_refused_before_anything_is_decoded(request, given, corpus, tmp_path, command):
    """A good footer over damaged pages: found on reading the text, when the folder holds no run yet.

    So the file may be repaired, which makes it another one, and the same folder used.
    """
    damage(corpus, "pages")
    line = request.getfixturevalue(command)(*given).line()
    assert line.startswith("error: a.parquet cannot be read as Parquet (")
    assert not (tmp_path / "out" / "_run" / "manifest.json").exists()


@pytest.mark.parametrize("output", ["in/a.parquet/out", "in/a.parquet"])
def test_an_output_that_cannot_be_written_is_refused(call, plan, given, tmp_path, output):
    """Found before anything is loaded, also by a dry run."""
    for do in (call, plan):
        line = do(*given, "--output", tmp_path / output).line()
        assert line.startswith(f"error: output.path {tmp_path / output}")


@pytest.mark.parametrize(
    "setting, said",
    [
        ("target.quantize=int4", "target.quantize int4 needs the extra `quantize`: pip install"),
        ("quality.language=true", "quality.language needs the extra `language`"),
    ],
)
def test_a_library_that_is_missing_is_said_before_a_model_is_read(refused, monkeypatch, setting, said):
    """Else every worker would load its models, decode a document, and only then find out."""
    for name in "py3langid", "torchao":
        monkeypatch.setitem(sys.modules, name, None)
    refused(said, "--set", setting)


def test_a_folder_with_damaged_records_is_refused_in_one_line(call, given, tmp_path):
    """No writer of ours leaves such: somebody must look, and needs no traceback for it."""
    manifest = tmp_path / "out" / "_run" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{")
    assert "is not a manifest that this version can read" in call(*given).line(5)
    manifest.unlink()
    part = manifest.with_name("parts") / "part-00000001-000000.parquet"
    part.parent.mkdir()
    part.write_bytes(b"PAR1")
    assert f"{part.name} is damaged" in call(*given).line()


@pytest.mark.parametrize(
    "name, kind",
    [("_run", "folder"), ("_run/parts", "folder"), ("errors", "folder"), ("_run/lock", "file"), ("_SUCCESS", "file")],
)
def test_a_file_in_the_place_of_a_folder_or_the_reverse_is_refused(call, plan, given, tmp_path, name, kind):
    """Somebody copied half a run, or the folder is another program's: nothing there is ours to replace."""
    path = tmp_path / "out" / name
    path.parent.mkdir(parents=True)
    path.touch() if kind == "folder" else path.mkdir()
    for do in (call, plan):
        assert f"{path} must be a {kind} of the run" in do(*given).line()


@pytest.mark.parametrize("name", ["errors", "_run/parts"])
def test_a_link_to_a_folder_elsewhere_is_refused(call, given, tmp_path, name):
    """Whoever may write to an output could have the run write, and delete temporary files, where he may not."""
    link = tmp_path / "out" / name
    link.parent.mkdir(parents=True)
    link.symlink_to(tmp_path)
    assert f"{link} is a symbolic link" in call(*given).line()


@pytest.mark.parametrize(
    "arguments, said",
    [
        *cases("""
        --output out -> output.path must be an absolute path or a URI inside a submitted job
        --set target.model=./mine -> target.model must be an absolute path or a URI inside a submitted job
        --set draft.model=models/mine -> models/mine is not a local folder (name one by its absolute path)
        --set draft.model=/tmp/_ray_pkg_1/mine -> draft.model is in the project uploaded with the job
        --input /tmp/_ray_pkg_1/in -> a copy removed by Ray: give an absolute path valid on each node
    """),
        ("--set target.model=/home/me/mine", f"does not exist on {platform.node()}; a model is a Hub id, or a"),
    ],
)
def test_what_only_the_submitters_machine_has_is_refused_inside_a_submitted_job(
    refused, tmp_path, monkeypatch, arguments, said
):
    """Its current folder is a copy that goes away with the job, and it runs where nobody's own folders are."""
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    monkeypatch.chdir(tmp_path)
    refused(said, *shlex.split(arguments))


def test_a_small_cache_holds_prompts_that_are_cut(plan, given):
    """It is refused only where the longest documents would be error rows in the morning."""
    plan(*given, *sets("decoding.cache_gib=0.002", "prompt.max_prompt_tokens=500")).exits(0)


def test_a_folder_that_another_driver_holds_is_refused(call, given, tmp_path):
    """Exit 4, and who holds it, once it has given a sign of life."""
    lock = tmp_path / "out" / "_run" / "lock"
    lock.parent.mkdir(parents=True)
    ended_already = threading.Event()

    def beat():
        holder = {"run_id": "feedbeef", "host": "another-host", "pid": 1, "heartbeat": time.time()}
        lock.with_name("feedbeef").write_text(json.dumps(holder))
        lock.with_name("feedbeef").replace(lock)

    def beat_on():
        while not ended_already.wait(0.1):
            beat()

    beat()
    other = threading.Thread(target=beat_on)
    other.start()
    ended = call(*given)
    ended_already.set()
    other.join()
    assert "is held by run feedbeef (process 1 on another-host)" in ended.exits(4).stderr
    assert read_json(lock)["run_id"] == "feedbeef"


def test_an_empty_path_is_refused():
    """A mistyped folder is not a run at its beginning."""
    assert specextend("status", "").line() == "error: a path must not be empty"  # a variable that is not set


def test_a_cluster_that_cannot_be_joined_is_said_in_one_line_and_holds_no_folder(corpus, tmp_path, monkeypatch):
    """At once, and the run had begun: the next start goes on with it. Before, it says which files each node needs."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    why = "no answer from 127.0.0.1:1 ([Errno 111] Connection refused); "
    model = ROOT / ".models" / "tiny-random" / "target"
    ended = summarize(*on(corpus, tmp_path / "out", "input.id_column=doc", f"target.model={model}")).exits(1)
    assert f"each node needs the same files at {model}, {corpus}" in ended.stderr.splitlines()
    assert ended.stderr.splitlines()[-1].startswith(f"error: Ray cannot be joined: {why}")
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "out" / "_run" / "lock").exists()


def test_a_refusal_is_json_where_json_was_asked_for(call, tmp_path):
    """A log collector reads stderr: the last line of a run that never began is an object too."""
    line = call("--config", tmp_path / "nowhere.yaml", "--log", "json").line()
    said = json.loads(line)
    assert said["event"] == "error"
    assert "nowhere.yaml" in said["message"]


def test_an_exit_code_is_kept_where_stderr_takes_no_line():
    """Its disk is full: Python ends with 1 or 120 then, and a scheduler tries again what no try can mend."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        process = subprocess.run(
            command("--config", "nowhere"), env=environment(), cwd=ROOT, stderr=full, timeout=LONGEST_S, check=False
        )
    assert process.returncode == 2


def test_a_plan_that_cannot_be_written_is_refused_in_one_line(plan, given, tmp_path):
    ended = plan(*given, "--json", tmp_path)
    assert ended.line().startswith(f"error: --json {tmp_path} cannot be written: [Errno 21] Is a directory")


@pytest.fixture
def silent():
    """The port of a server that takes calls and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=64) as server:
        yield server.getsockname()[1]


def black_hole(port):
    return f"gs://anonymous@bucket/in?scheme=http&endpoint_override=127.0.0.1%3A{port}&retry_limit_seconds=600"


def test_a_run_that_waits_for_a_store_can_be_told_to_stop(tmp_path, silent, start):
    """SIGTERM was not heard while the library waited: whoever preempts a machine had to kill."""
    briefly = partial(dying_command, "HANG", 1)  # a second, not twenty, until it ends by force
    process = start("--input", black_hole(silent), "--output", tmp_path / "out", command=briefly)
    wait_for(lambda: connections(process.pid, silent), "call to the store")
    process.send_signal(signal.SIGTERM)
    assert "interrupted: SIGTERM received" in end_of(process, 75)


def connections(pid, port):
    """What the process and all others of this machine have open to a port of loopback."""
    lines = Path(f"/proc/{pid}/net/tcp").read_text().splitlines()
    return [line for line in lines if f"0100007F:{port:04X} 01" in line]


def test_a_hub_that_is_away_is_exit_1(call, hub, given, monkeypatch):
    """Exit 2 would keep a scheduler from trying again; a model of that name may well be there tomorrow."""
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")
    line = call(*given, "--set", "target.model=somebody/something").line(1)
    assert line.startswith("error: the Hub does not answer for somebody/something")
    assert line.endswith("run again")
