"""Whole trainings on a random target: what is learned means nothing, that it can be used and gone on with does."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from specextend.decoding.decoding_options import DraftKind
from specextend.loading import load_engine
from specextend.training.task import TrainedKind
from tests.tiny_models import random_prompt, request
from tests.training.conftest import Workshop

KINDS: dict[TrainedKind, DraftKind] = {"eagle": "eagle", "model": "model"}


@pytest.fixture(scope="module")
def drafts(workshop: Workshop, tmp_path_factory) -> dict[str, Path]:
    """A trained draft of each kind, and what its training said in `said.txt`."""
    folders = {}
    for kind in KINDS:
        folders[kind], said = tmp_path_factory.mktemp("drafts") / kind, []
        figures = workshop.train(folders[kind], kind, said.append)
        assert figures["recordings"] == 5
        assert figures["held_out"] == 1
        (folders[kind] / "said.txt").write_text("\n".join(said))
    return folders


@pytest.mark.parametrize("kind", KINDS)
def test_a_trained_draft_is_loaded_and_lossless(workshop, drafts, kind):
    """A draft that cannot be run has been trained for nothing; one that changes the text must not exist."""
    requests = [request(str(length), random_prompt(length, vocab_size=257), 16) for length in (40, 150)]
    plain = load_engine(workshop.config(decoding={"mode": "autoregressive", "cache_gib": 0.05}))
    drafted = load_engine(workshop.config(draft={"kind": KINDS[kind], "model": str(drafts[kind])}))
    expected, found = ({c.request_id: c.token_ids for c in engine.generate(requests)} for engine in (plain, drafted))
    assert found == expected
    assert all(len(token_ids) > 4 for token_ids in found.values())


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls(drafts, kind):
    """On any target there is something to learn, if only which tokens are frequent."""
    said = (drafts[kind] / "said.txt").read_text()
    losses = [float(loss) for loss in re.findall(r"loss ([\d.]+)", said)]
    assert len(losses) >= 4
    assert losses[-1] < 0.95 * losses[0]


def test_a_folder_of_another_training_is_refused(workshop, drafts):
    """Its recordings are of other prompts."""
    with pytest.raises(
        ValueError, match=r"settings\.json belongs to a training with other settings; choose another output"
    ):
        workshop.train(drafts["eagle"], "eagle", num_samples=7)
