"""The job with models of the Hub, as on a cluster: a driver that has no weights, workers that fetch them."""

import shutil
from functools import partial

import pytest
from safetensors.torch import load_file, save_file

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
def test_a_run_of_models_by_name_loads_one_commit_and_keeps_it(away, hub, tmp_path):
    """From the first worker to a start next month: said once in the log, in the manifest, in each start's record.

    An author's push in the night would otherwise end every run that is not done: other weights, exit 5.
    """
    commits, start = away
    said = start().exits(0).stderr
    for name, commit in commits.items():
        assert said.count(f"{name} owner/{name} (default branch) is commit {commit}") == 1
        snapshots = tmp_path / "cache" / "hub" / f"models--owner--{name}" / "snapshots"
        assert [path.name for path in snapshots.iterdir()] == [commit]
    output = tmp_path / "out"
    assert len(rows(output / "summaries")) == 2
    moved = shutil.copytree(MODELS / "target", tmp_path / "moved")
    weights = load_file(moved / "model.safetensors")
    save_file({name: weight * 2 for name, weight in weights.items()}, moved / "model.safetensors", {"format": "pt"})
    newer = hub.push("owner/target", moved)
    shutil.rmtree(output / "summaries")
    said = start().exits(0).stderr
    assert f"target owner/target (default branch) is commit {commits['target']}, as when this run began" in said
    assert "weights of target: " in start("--set", f"target.model=owner/target@{newer}").exits(5).stderr
    for record in (output / "_run" / "manifest.json", *(output / "_run" / "attempts").iterdir()):
        models = read_json(record)["models"]
        assert {name: model["commit"] for name, model in models.items()} == commits
