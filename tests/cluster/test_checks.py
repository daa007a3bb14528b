"""Which models a start takes: the commit that the run began with, whatever its branch is by now."""

import shutil
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.torch import load_file, save_file

from specextend.cluster.checks import check_run, check_same_run
from specextend.cluster.exits import OtherRunError, RefusedError
from specextend.config import RunConfig
from specextend.data.fingerprint import fingerprint, other_configuration, write_manifest
from specextend.data.prompts import CLOCK, Prompts
from specextend.models.causal_lm import load_tokenizer
from tests.cluster.conftest import MODELS

TARGET = "owner/target"
DRAFT = "owner/draft"


@pytest.fixture
def configure(tmp_path):
    """Makes configurations of one corpus and one output folder; keywords are sections."""
    pq.write_table(pa.table({"text": ["one", "two"]}), tmp_path / "input.parquet")

    def configure(**sections):
        values = {
            "input": {"path": str(tmp_path / "input.parquet")},
            "output": {"path": str(tmp_path / "out")},
            "target": {"model": TARGET},
            "draft": {"kind": "model", "model": DRAFT},
            "decoding": {"max_new_tokens": 5},
        }
        return RunConfig.from_values(values | sections)

    return configure


@pytest.fixture
def pair(hub):
    """The tiny pair on a Hub: its commits."""
    return hub.push(TARGET, MODELS / "target"), hub.push(DRAFT, MODELS / "draft-model")


def test_a_resume_takes_the_commit_of_its_run_when_the_branch_has_moved_on(hub, pair, configure, tmp_path):
    """An author's push in the night would otherwise end every run that is not done: other weights, exit 5."""
    begun = check_run(configure())
    assert not check_same_run(begun)
    write_manifest(begun.output, begun.manifest)
    shutil.copytree(MODELS / "target", tmp_path / "newer")
    path = tmp_path / "newer" / "model.safetensors"
    save_file({name: weight * 2 for name, weight in load_file(path).items()}, path, {"format": "pt"})
    newer = hub.push(TARGET, tmp_path / "newer")
    again = check_run(configure())
    assert check_same_run(again)
    assert again.config.target.model == f"{TARGET}@{pair[0]}"
    assert again.notes[0] == f"target {TARGET} (default branch) is commit {pair[0]}, as when this run began"
    asked_for = {"model": f"{TARGET}@{newer}"}
    with pytest.raises(OtherRunError, match="weights of target: "):
        check_same_run(check_run(configure(target=asked_for)))


def test_a_template_that_asks_the_clock_is_told_the_time_at_which_the_run_began(configure, tmp_path):
    """After midnight, and on another worker, the prompts were others under one fingerprint."""
    shutil.copytree(MODELS / "target", tmp_path / "target")
    template = "{{ strftime_now('%H:%M:%S') }} {{ messages[-1].content }}"
    (tmp_path / "target" / "chat_template.jinja").write_text(template)
    sections = {
        "target": {"model": str(tmp_path / "target")},
        "draft": {"kind": "ngram"},
    }
    begun = check_run(configure(**sections))
    begun.manifest["identity"]["config"][f"prompt.template_options.{CLOCK}"] = "2026-01-31T08:00:00"
    begun.manifest["fingerprint"] = fingerprint(begun.manifest["identity"])
    write_manifest(begun.output, begun.manifest)
    again = check_run(configure(**sections))
    assert check_same_run(again)
    assert again.manifest == begun.manifest
    worker = Prompts(load_tokenizer(again.config.target.model), again.config.prompt, 1000)
    prompt = worker.render("x", 0).token_ids
    assert prompt == again.tasks[0].prompts.render("x", 0).token_ids
    assert load_tokenizer(str(tmp_path / "target")).decode(prompt).startswith("08:00:00 ")
    assert not other_configuration(begun.manifest, check_run(configure(output={"path": "other"}, **sections)).manifest)


def test_a_library_that_is_missing_is_said_before_a_model_is_read(hub, pair, configure, monkeypatch):
    """Else every worker would load its models, decode a document, and only then find out."""
    monkeypatch.setitem(sys.modules, "py3langid", None)
    monkeypatch.setitem(sys.modules, "torchao", None)
    check_run(configure())
    with pytest.raises(RefusedError, match=r"target\.quantize int4 needs the extra `quantize`: pip install"):
        check_run(configure(target={"model": TARGET, "quantize": "int4"}))
    with pytest.raises(RefusedError, match=r"quality\.language needs the extra `language`"):
        check_run(configure(quality={"language": True}))
