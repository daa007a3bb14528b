"""Whole trainings on a random target: what is learned means nothing, that it can be used and gone on with does."""

import json
import shutil

import pytest

from specextend.models.loading import load_engine
from tests.job.conftest import read_json
from tests.reference_outputs import tokens_of
from tests.tiny_models import random_prompt, request


class Shown:
    """What a training showed, until it was interrupted at the first of some stops."""

    def __init__(self, *stops):
        self.stops = list(stops)
        self.all = []

    def __call__(self, stage, done, total, detail=""):
        if self.stops and (stage, done, total) == self.stops[0]:
            self.stops.pop(0)
            raise KeyboardInterrupt
        self.all.append([stage, done, total, detail])


@pytest.fixture(scope="module")
def draft(workshop, tmp_path_factory):
    """A trained head, its figures in `figures.json` and what its training showed in `shown.json`."""
    folder = tmp_path_factory.mktemp("drafts") / "head"
    shown = Shown()
    figures = workshop.train(folder, shown)
    (folder / "figures.json").write_text(json.dumps(figures))
    (folder / "shown.json").write_text(json.dumps(shown.all))
    return folder


def test_a_trained_draft_is_loaded_and_lossless(workshop, draft):
    """A draft that cannot be run has been trained for nothing; one that changes the text must not exist."""
    requests = [request(str(length), random_prompt(length, vocab_size=257), 16) for length in (40, 150)]
    plain = load_engine(workshop.config(decoding__mode="autoregressive"))
    drafted = load_engine(workshop.config(draft__kind="eagle", draft__model=str(draft)))
    expected, found = (tokens_of(engine.generate(requests)) for engine in (plain, drafted))
    assert found == expected
    assert all(len(token_ids) > 4 for token_ids in found.values())


def test_the_loss_falls(draft):
    """On any target there is something to learn, if only which tokens are frequent."""
    shown = read_json(draft / "shown.json")
    losses = [float(detail.removeprefix(", loss ")) for stage, *_, detail in shown if stage == "training"]
    assert len(losses) >= 4
    assert losses[-1] < 0.95 * losses[0]


def test_the_best_round_is_kept_and_the_card_says_what_each_was_worth(draft):
    """A loss that falls does not say that more is accepted; a last round that was worse must not be shipped."""
    figures = read_json(draft / "figures.json")
    card = (draft / "README.md").read_text()
    assert [(each["round"], each["answers"]) for each in figures["rounds"]] == [(1, 8), (2, 16)]
    assert all(f"| {each['tokens_per_step']:.3f} |" in card for each in figures["rounds"])
    best = max(figures["rounds"], key=lambda each: each["tokens_per_step"])["round"]
    assert figures["best_round"] == best
    kept = draft / "work" / f"round-{best}" / "model.safetensors"
    assert (draft / "model.safetensors").read_bytes() == kept.read_bytes()


def test_an_interrupted_round_goes_on_to_the_same_draft(workshop, draft, tmp_path, monkeypatch):
    """It takes hours: no answer, recording or minute of training is lost, and the result is as if nothing happened."""
    monkeypatch.setattr("specextend.training.eagle_head.CHECKPOINT_S", 0.0)
    monkeypatch.setattr("specextend.training.recording.ROWS", 3)
    shown = Shown(("answers", 5, 8), ("recordings", 4, 8), ("training", 7, 64), ("evaluation", 2, 4))
    while shown.stops:
        with pytest.raises(KeyboardInterrupt):
            workshop.train(tmp_path, shown)
    found = workshop.train(tmp_path)
    assert found == read_json(draft / "figures.json")
    assert (tmp_path / "model.safetensors").read_bytes() == (draft / "model.safetensors").read_bytes()
    assert ["answers", 3, 3] in [given[:3] for given in shown.all], "those that were given are kept"
    assert [done for stage, done, total, *_ in shown.all if (stage, total) == ("training", 64)] == [*range(1, 65)]


def test_a_draft_is_gone_on_from_and_measured_first(workshop, draft, tmp_path):
    """What it was worth before says whether the training was worth its time; if not, it is what the output holds."""
    figures = workshop.train(tmp_path / "more", start_from=str(draft), num_rounds=1)
    assert [each["round"] for each in figures["rounds"]] == [0, 1]
    card = (tmp_path / "more" / "README.md").read_text()
    assert "Round 0 is the draft that it went on from, `head`." in card
    assert str(draft.parent) not in card, "folders of the machine are nobody's business"
    before = read_json(draft / "figures.json")
    assert figures["rounds"][0]["tokens_per_step"] == max(each["tokens_per_step"] for each in before["rounds"])
    with pytest.raises(ValueError, match="this looks like a whole model"):
        workshop.train(tmp_path / "other", start_from=workshop.target)


def test_two_rounds_that_bring_nothing_end_a_training(workshop, draft, tmp_path):
    """More rounds would take hours and give nothing; one alone may be bad luck."""
    folder = shutil.copytree(draft, tmp_path / "draft")
    points = [{"round": number, "answers": 8 * number, "tokens_per_step": 3.0 - number} for number in (1, 2, 3)]
    (folder / "work" / "curve.json").write_text(json.dumps(points))
    assert workshop.train(folder, num_rounds=9) == {"best_round": 1, "rounds": points}


def test_a_folder_of_another_training_is_refused(workshop, draft):
    """Its recordings are of other prompts."""
    with pytest.raises(
        ValueError, match=r"settings\.json belongs to a training with other settings; choose another output"
    ):
        workshop.train(draft, num_epochs=7)
