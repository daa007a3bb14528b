"""The package from Python: what `help` shows, a run as a call, and the examples of docs/python.md."""

import json
import pydoc
import re
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import specextend
from specextend import RunConfig, RunResult
from tests.job.conftest import (
    AT_ONCE_S,
    CONFIG,
    LONGEST_S,
    environment,
    long_texts,
    parts,
    ran,
    rows,
    text_of,
    wait_for,
    write_corpus,
)

BLOCKS = re.findall(r"^```python\n(.*?)^```$", text_of("docs/python.md"), re.MULTILINE | re.DOTALL)


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "in" / "a.parquet", ["one two three", None, "four five"], id=[*"abc"])


def test_help_shows_the_public_names():
    """They are imported when they are used, and `help` showed none."""
    text = pydoc.plain(pydoc.render_doc(specextend))
    assert callable(specextend.run)
    for name in specextend.__all__:
        assert re.search(rf"\b{name}\b", text.partition("DATA")[0]), name
        assert name in dir(specextend)


def test_a_run_is_a_call(corpus, tmp_path, local_ray, monkeypatch):
    """With the counts, the paths and the report as values; handlers and streams stay the caller's."""
    monkeypatch.chdir(tmp_path)

    def of_the_caller():
        return [signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM), sys.stdout, sys.stderr]

    before = of_the_caller()
    values = {"input.id_column": "id", "decoding.max_new_tokens": 4}
    result = specextend.run(str(CONFIG), input=corpus, output="out", settings=values, progress=False)
    assert isinstance(result, RunResult)
    assert (result.exit_code, result.output) == (3, f"{tmp_path}/out"), "a row failed"
    assert result.rows == {"input": 3, "done": 2, "errors": 1, "pending": 0}
    assert repr(result) == f"RunResult(exit_code=3, output={result.output!r})", "what a notebook shows, no whole report"
    for folder, names in (result.summaries, ["a", "c"]), (result.errors, ["b"]):
        assert [row["doc_id"] for row in rows(Path(folder))] == names
    assert result.report["errors"][0]["error_class"] == "NullText"
    assert Path(result.page).read_text().startswith("<!doctype html>")
    assert of_the_caller() == before
    again = specextend.run(str(CONFIG), input=corpus, output="out", settings=values | {"job.max_error_fraction": 0.5})
    assert (again.exit_code, again.rows) == (0, result.rows)


def test_a_run_in_a_thread_can_be_cancelled(tmp_path, local_ray):
    """As an orchestrator does; what is finished is there, and the process goes on."""
    corpus = write_corpus(tmp_path / "in" / "a.parquet", long_texts(20), doc_id=[*map(str, range(20))])
    overrides = [f"input.path={corpus}", f"output.path={tmp_path / 'out'}", f"job.commit_every_s={AT_ONCE_S}"]
    values = RunConfig.load(CONFIG, overrides).model_dump(mode="json")
    cancel = threading.Event()
    with ThreadPoolExecutor(1) as threads:
        running = threads.submit(specextend.run, values, cancel=cancel, progress=False)
        wait_for(lambda: parts(tmp_path / "out"), "commit")
        with pytest.raises(ValueError, match=r"specextend.run is active in another thread"):
            specextend.run(values, progress=False)
        cancel.set()
        result = running.result(LONGEST_S)
    assert result.exit_code == 75
    assert min(result.rows["done"], result.rows["pending"]) > 0


@pytest.mark.parametrize(
    "options, said",
    [
        ({"settings": {"tree.nods": 3}}, "did you mean nodes"),
        ({"settings": {"input.text_column": "body"}}, "no column 'body'"),
        ({"redo_as": "large"}, "--redo-as needs --redo"),
    ],
)
def test_what_the_command_refuses_is_raised(corpus, tmp_path, options, said):
    """In the same words."""
    with pytest.raises(ValueError, match=said):
        specextend.run("tiny-random", input=corpus, output=tmp_path / "out", **options)


def script(folder, code):
    """Run code as a script of somebody who has set nothing for Ray."""
    kept = {name: value for name, value in environment().items() if not name.startswith("RAY_AUTH")}
    return ran(sys.executable, "-c", code, cwd=folder, env=kept)


@pytest.mark.slow
def test_the_examples_of_the_page_run(tmp_path):
    """In their order and in a script, which starts a Ray of its own, with the tiny pair in place of the large one."""
    page = "\n".join(BLOCKS).replace('"smollm2"', '"tiny-random"').replace("threading.Timer(", "threading.Timer(9e6 + ")
    ended = script(tmp_path, f"{page}\nimport os\nos._exit(0)  # the timer would go on").exits(0)
    assert len(BLOCKS) == 8
    assert pq.read_table(tmp_path / "out" / "reports" / "summaries").num_rows == 2
    assert "govreport-1k-00" in ended.stdout
    assert "0% of the work, 0/2 done, waiting for Ray to start a worker\n" in ended.stderr, "lines and no bar"
    assert "\x1b[" not in ended.stderr


@pytest.mark.slow
def test_the_cells_of_the_notebook_run(tmp_path):
    """From two files to a table, in their order, with the tiny pair in place of the large one.

    A reader on a forge sees the outputs, which are kept.
    """
    notebook = json.loads(text_of("examples/quickstart.ipynb"))
    code_cells = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    cells = ["".join(cell["source"]) for cell in code_cells]
    assert len(notebook["cells"]) == 16
    assert [source for source, cell in zip(cells, code_cells, strict=True) if not cell["outputs"]] == []
    code = "\n".join(cells).replace('"smollm2"', '"tiny-random"')
    code = code.replace("few = {", 'few = {"input.id_column": None, ')  # the tiny pair names that of the demo
    ended = script(tmp_path, f"{code}\nprint(pq.read_table(result.summaries)['doc_id'].to_pylist())").exits(0)
    assert "2 documents in out/quickstart/documents" in ended.stdout
    assert "['clinic.txt', 'harbour.md']" in ended.stdout
    assert "passage" in ended.stdout, "the table of the answers of several tasks"


def test_a_ray_that_was_imported_too_early_is_said(tmp_path):
    """It had read its variables by then: the private one would not have been private, and did not start."""
    ended = script(tmp_path, f"import ray, specextend\nspecextend.run({str(CONFIG)!r}, output='out')")
    assert "call ray.init() first to use that Ray" in ended.stderr.splitlines()[-1]
