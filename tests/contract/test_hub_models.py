"""The job with models of the Hub, as on a cluster: a driver that has no weights, workers that fetch them."""

import shutil
from functools import partial

import pytest

from tests.job.conftest import ROOT, on, read_json, rows, summarize, write_corpus

MODELS = ROOT / ".models" / "tiny-random"


@pytest.fixture
def away(hub, tmp_path, monkeypatch):
    """A Hub with the tiny pair: the commits of its models, and what starts the job on them in a process of its own."""
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "cache"), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    corpus = write_corpus(tmp_path / "in" / "a.parquet", ["a document", "another one"])
    settings = ("input.id_column=null", "target.model=owner/target", "draft.model=owner/draft")
    commits = {
        "target": hub.push("owner/target", MODELS / "target"),
        "draft": hub.push("owner/draft", MODELS / "draft-model"),
    }
    return commits, partial(summarize, *on(corpus, tmp_path / "out", *settings))


@pytest.mark.slow
def test_a_run_of_models_by_name_loads_one_commit_and_keeps_it(away, tmp_path):
    """From the first worker to a start next month: said once in the log, in the manifest, in each start's record."""
    commits, start = away
    said = start().exits(0).stderr
    for name, commit in commits.items():
        assert said.count(f"{name} owner/{name} (default branch) is commit {commit}") == 1
        snapshots = tmp_path / "cache" / "hub" / f"models--owner--{name}" / "snapshots"
        assert [path.name for path in snapshots.iterdir()] == [commit]
    assert len(rows(tmp_path / "out" / "summaries")) == 2
    records = tmp_path / "out" / "_run"
    for record in (records / "manifest.json", *(records / "attempts").iterdir()):
        models = read_json(record)["models"]
        assert {name: model["commit"] for name, model in models.items()} == commits


@pytest.mark.slow
def test_an_added_task_is_answered_by_the_model_of_its_run(away, hub, tmp_path):
    """Though the branch has moved since: its column stands beside those of the others."""
    commits, start = away
    start("--task", "summary").exits(0)
    moved = shutil.copytree(MODELS / "target", tmp_path / "moved")
    (moved / "NOTICE").write_text("another release")
    assert hub.push("owner/target", moved) != commits["target"]
    start("--task", "summary", "--task", "translation").exits(0)
    manifest = read_json(tmp_path / "out" / "added" / "translation" / "_run" / "manifest.json")
    assert manifest["models"]["target"]["commit"] == commits["target"]
