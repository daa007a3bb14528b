"""N-gram drafts in the engine, alone and merged: text that repeats itself, cost, and what they need of the target."""

import pytest
import torch

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.speculation import Adaptive
from specextend.drafters.ngram import NgramDrafter
from specextend.stats import DecodingStats
from tests.reference_outputs import generate
from tests.test_adaptive import NUM_NODES, ScriptedCosts
from tests.tiny_models import (
    FAMILIES,
    Pair,
    engine_with,
    of_length,
    random_prompt,
    tiny_config,
    tiny_engine,
    tiny_model,
    write_eagle,
    write_model,
)

LENGTHS = (300, 37, 129)
NEW = 60


@pytest.fixture(scope="module")
def looping(tmp_path_factory):
    """A target whose layers say less than its embedding: it falls into loops of 1 to 15 tokens, and out of some."""
    folder = tmp_path_factory.mktemp("looping")
    model = tiny_model(FAMILIES["llama"], 3)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "proj" in name:
                weight.mul_(0.3)
    drafts = {"eagle": write_eagle(folder / "eagle", model)}
    return Pair(write_model(model, folder / "target"), drafts), model


@pytest.fixture(scope="module")
def references(looping):
    return {length: generate(looping[1], random_prompt(length), NEW).token_ids for length in LENGTHS}


def run(engine):
    total = DecodingStats()
    outputs = {}
    for completion in engine.generate([of_length(length, NEW) for length in LENGTHS]):
        outputs[int(completion.request_id)] = completion.token_ids
        total.add(completion.stats)
    return outputs, total


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft", ["ngram", "merged-eagle"])
def test_text_that_repeats_itself_is_copied_deep_and_stays_the_targets_own(draft, batch, looping, references):
    """Paths deeper than a model's tree are packed, and a batch absorbs runs of very different lengths."""
    engine = tiny_engine(looping[0], draft, decoding__max_batch_size=batch, tree__nodes=14, tree__depth=2)
    outputs, stats = run(engine)
    assert outputs == references
    assert stats.num_output_tokens > 2 * (stats.num_spec_steps + stats.num_plain_steps)
    assert len(stats.acceptance_histogram) == 17
    assert sum(stats.acceptance_histogram[10:]) > 0
    assert stats.num_network_steps == (draft != "ngram") * stats.num_spec_steps
    copied = stats.num_spec_steps - stats.acceptance_histogram[0]
    assert stats.num_first_accepted < 0.3 * stats.num_spec_steps < copied, "a copy is no hit of a random head"


def test_a_draft_of_one_node_makes_room_for_deep_copies_of_its_neighbours(looping, references):
    """A draft runs a batch padded to its longest run; a region of its cache must hold that, not its own tree alone."""
    engine = tiny_engine(
        looping[0], "merged-eagle", decoding__max_batch_size=3, tree__nodes=14, tree__depth=1, cache__policy="full"
    )
    absorb = engine.drafter.absorb
    widest = 0

    def noting(rows, decided):
        nonlocal widest
        widest = max(widest, *map(len, decided.token_ids))
        absorb(rows, decided)

    engine.drafter.absorb = noting
    outputs, _ = run(engine)  # a region that is too small is an assertion of the draft's cache
    assert outputs == references
    assert widest > 8


@pytest.mark.parametrize("batch", [1, 3])
def test_what_repeats_itself_is_copied_while_a_draft_pauses(batch, looping, references):
    """A draft that costs five plain steps is given up, but copies cost nothing: they go on, and are counted."""
    adaptive = Adaptive(ScriptedCosts(lambda rows: 1 + rows / 20, lambda: 5.0), NUM_NODES)
    config = tiny_config(looping[0], "merged-eagle", decoding__max_batch_size=batch, attention__tree="dense")
    outputs, stats = run(engine_with(config, adaptive=adaptive))
    assert outputs == references
    assert stats.num_fallbacks >= 1
    assert stats.num_draft_tokens > 2 * NUM_NODES, "more than the tries at the start"
    assert stats.num_accepted_tokens > stats.num_spec_steps > 10
    assert 0 < stats.num_network_steps < stats.num_spec_steps, "n-grams alone say nothing of the head"


def test_nothing_is_proposed_past_the_last_token(looping):
    """A tree that the output cannot take would be verified in vain, and reach past the context."""
    drafter = NgramDrafter(TreeOptions(nodes=20, depth=2), torch.device("cpu"))
    text = torch.tensor([*range(5, 40), 3])
    drafter.admit(0, len(text), 6)
    drafter.prefill(0, text, torch.zeros(len(text), 1))
    depths = []
    for new in ([5, 6, 7], [8], [9]):
        drafter.read(0, new)
        depths.append(int(drafter.propose([0]).depths.max()))
    assert depths == [2, 1, 0]
