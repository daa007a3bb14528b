"""The job with models of the Hub, as on a cluster: a driver that has no weights, workers that fetch them."""

import shutil

import pytest

from tests.hub_server import serving
from tests.job.conftest import ROOT, read_json, rows, summarize, write_corpus

MODELS = ROOT / ".models" / "tiny-random"


def start(hub, cache, folder, monkeypatch, *more):
    """Start the job on the tiny pair of a Hub."""
    for name, value in {"HF_ENDPOINT": hub.url, "HF_HOME": str(cache), "HF_HUB_OFFLINE": "0"}.items():
        monkeypatch.setenv(name, value)
    corpus = write_corpus(folder / "in" / "a.parquet", ["a document", "another one"])
    settings = ("input.id_column=null", "target.model=owner/target", "draft.model=owner/draft")
    changes = [argument for setting in settings for argument in ("--set", setting)]
    return summarize("--input", corpus, "--output", folder / "out", *changes, *more)


@pytest.mark.slow
def test_a_run_of_models_by_name_loads_one_commit_and_keeps_it(tmp_path, monkeypatch):
    """From the first worker to a start next month: said once in the log, in the manifest, in each start's record."""
    with serving() as hub:
        commits = {
            name: hub.push(f"owner/{name}", MODELS / folder)
            for name, folder in (("target", "target"), ("draft", "draft-model"))
        }
        ended = start(hub, tmp_path / "cache", tmp_path, monkeypatch).exits(0)
        for name, commit in commits.items():
            assert ended.stderr.count(f"{name} owner/{name} (default branch) is commit {commit}") == 1
            snapshots = tmp_path / "cache" / "hub" / f"models--owner--{name}" / "snapshots"
            assert [path.name for path in snapshots.iterdir()] == [commit]
        assert len(rows(tmp_path / "out" / "summaries")) == 2
        records = [tmp_path / "out" / "_run" / "manifest.json", *(tmp_path / "out" / "_run" / "attempts").iterdir()]
        for record in records:
            models = read_json(record)["models"]
            assert {name: model["commit"] for name, model in models.items()} == commits


@pytest.mark.slow
def test_an_added_task_is_answered_by_the_model_of_its_run(tmp_path, monkeypatch):
    """Though the branch has moved since: its column stands beside those of the others."""
    given = tmp_path / "cache", tmp_path, monkeypatch, "--task", "summary"
    with serving() as hub:
        commit = hub.push("owner/target", MODELS / "target")
        hub.push("owner/draft", MODELS / "draft-model")
        start(hub, *given).exits(0)
        moved = shutil.copytree(MODELS / "target", tmp_path / "moved")
        (moved / "NOTICE").write_text("another release")
        assert hub.push("owner/target", moved) != commit
        start(hub, *given, "--task", "translation").exits(0)
    manifest = read_json(tmp_path / "out" / "added" / "translation" / "_run" / "manifest.json")
    assert manifest["models"]["target"]["commit"] == commit
