"""A replay is what the engine does: the draft is asked the same things in the same order, and is accepted as often."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from specextend.bench.replay import Divergence, FirstLevel, Replay, Replayer, diverge
from specextend.bench.trace import Trace, TraceRecorder
from specextend.decoding.decoding_options import CacheOptions
from specextend.decoding.engine import Engine
from specextend.decoding.model import CachedModel
from specextend.decoding.tree import roots_only
from specextend.stats import DecodingStats
from tests.tiny_models import EOS_TOKEN_ID, FAMILIES, Pair, engine_with, random_prompt, request, tiny_config, write_pair

NUM_LAYERS = 3
EVERY_STEP = {"policy": "retrieval", "score_layers": (0, -1), "refresh_every": 1}


@dataclass(slots=True)
class Listening:
    """A drafter that notes what it is asked."""

    drafter: Any
    calls: list[tuple] = field(default_factory=list)

    @property
    def hidden_layers(self):
        return self.drafter.hidden_layers

    @property
    def num_levels(self):
        return self.drafter.num_levels

    def admit(self, row, num_prompt_tokens, max_new_tokens):
        return self.drafter.admit(row, num_prompt_tokens, max_new_tokens)

    def prefill(self, row, token_ids, hidden):
        self.calls.append(("prefill", token_ids.tolist(), hidden.clone()))
        self.drafter.prefill(row, token_ids, hidden)

    def select(self, row, positions):
        self.calls.append(("select", positions.tolist(), torch.zeros(1)))
        self.drafter.select(row, positions)

    def absorb(self, rows, decided):
        [new] = decided.token_ids
        self.calls.append(("absorb", new, decided.features[0, : len(new)].clone()))
        self.drafter.absorb(rows, decided)

    def propose(self, rows):
        trees = self.drafter.propose(rows)
        self.calls.append(("propose", trees[0].token_ids.tolist(), trees[0].log_probs))
        return trees

    def release(self, row):
        self.drafter.release(row)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return write_pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])


@dataclass(frozen=True, slots=True)
class Loaded:
    """A target, a drafter that notes what it is asked, and an engine on both."""

    target: CachedModel
    drafter: Listening
    engine: Engine
    options: CacheOptions

    def recorder(self, scored_layers: Iterable[int] = range(NUM_LAYERS), eos: int = EOS_TOKEN_ID) -> TraceRecorder:
        hidden_layers, margin = self.drafter.hidden_layers, self.drafter.num_levels
        return TraceRecorder(
            self.target, [eos], hidden_layers=hidden_layers, scored_layers=scored_layers, margin=margin
        )

    def replay(self, trace: Trace, drafter: Any = None) -> Replay:
        replayer = Replayer(trace, drafter or self.drafter, self.options, NUM_LAYERS)
        return replayer.run(self.target.scale)


def load(pair: Pair, draft: str, **choice: Any) -> Loaded:
    config = tiny_config(pair, draft, **{f"cache__{name}": value for name, value in choice.items()})
    engine = engine_with(config, Listening)
    return Loaded(engine.target, engine.drafter, engine, config.cache)


def histogram(replay: Replay, num_levels: int) -> list[int]:
    counts = [step.num_accepted for step in replay.steps if step.num_nodes]
    return [counts.count(number) for number in range(num_levels + 1)]


@pytest.mark.parametrize(
    ("draft", "length", "choice"),
    [
        ("good", 300, {"policy": "full"}),
        ("good", 300, {"policy": "retrieval", "refresh_every": 10_000}),
        ("eagle", 300, {"policy": "streaming"}),
        ("eagle", 300, EVERY_STEP),
        ("reduced", 37, {"policy": "full"}),
        ("reduced", 150, {"policy": "retrieval"}),
        ("merged-good", 150, {"policy": "streaming"}),
        ("merged-good", 150, EVERY_STEP),
        ("ngram", 150, {"policy": "full"}),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else str(value),
)
def test_a_replay_is_what_the_engine_does(draft, length, choice, pair):
    """Every call with the same tokens and features, every tree the same, every step accepted as far."""
    loaded = load(pair, draft, **choice)
    [completion] = loaded.engine.generate([request("a", random_prompt(length), 40)])
    ours, loaded.drafter.calls = loaded.drafter.calls, []
    trace = loaded.recorder().record(random_prompt(length), None, 40)
    replay = loaded.replay(trace)
    assert trace.known_token_ids[: trace.num_counted] == completion.token_ids
    assert [call[:2] for call in loaded.drafter.calls] == [call[:2] for call in ours]
    for theirs, own in zip(loaded.drafter.calls, ours, strict=True):
        torch.testing.assert_close(theirs[2], own[2], rtol=1e-3, atol=1e-4)
    stats = completion.stats
    assert histogram(replay, loaded.drafter.num_levels) == stats.acceptance_histogram
    assert sum(not step.num_nodes for step in replay.steps) == stats.num_plain_steps
    assert sum(step.num_nodes for step in replay.steps) == stats.num_draft_tokens
    for name in ("num_retrievals", "retrieval_coverage_sum", "retrieval_churn_sum"):
        assert getattr(replay.stats, name) == pytest.approx(getattr(stats, name), abs=1e-4)


def test_an_output_that_ends_early_is_replayed_to_its_end(pair):
    """EOS stops the engine inside a step; the margin behind it is seen by trees and counts for nothing."""
    loaded = load(pair, "good", policy="full")
    whole = loaded.recorder().record(random_prompt(50), None, 20)
    trace = loaded.recorder((), eos=whole.known_token_ids[9]).record(random_prompt(50), None, 20)
    first = whole.known_token_ids.index(whole.known_token_ids[9])
    assert trace.num_counted == first + 1
    assert len(trace.known_token_ids) == trace.num_counted + loaded.drafter.num_levels
    assert loaded.replay(trace).steps[-1].first < trace.num_counted


def test_a_forced_answer_goes_on_where_the_target_would_not(pair):
    """The path ends where the target's own choice is another token than the text's, even if the tree holds the text."""
    loaded = load(pair, "same", policy="full")
    own = loaded.recorder().record(random_prompt(30), None, 24)
    answer = own.known_token_ids[:24]
    answer[10] = (answer[10] + 1) % 100 + 3
    forced = loaded.recorder().record(random_prompt(30), answer, 0)
    assert forced.known_token_ids[:24] == answer
    assert forced.num_counted == 24
    assert forced.choice_token_ids[:11] == own.choice_token_ids[:11]
    replay = loaded.replay(forced)
    decided = {step.first + step.num_accepted for step in replay.steps}
    assert 10 in decided, "the token that differs can only be a bonus"
    assert [step.first for step in replay.steps[1:]] == [
        step.first + step.num_accepted + 1 for step in replay.steps[:-1]
    ]
    assert all(step.agrees for step in replay.steps), "the draft is the target"


def test_a_forced_greedy_output_is_replayed_as_the_greedy_one(pair):
    """One forward of many tokens records what as many single steps do."""
    loaded = load(pair, "good", policy="retrieval")
    greedy = loaded.recorder().record(random_prompt(200), None, 30)
    forced = loaded.recorder().record(random_prompt(200), greedy.known_token_ids[: greedy.num_counted], 0)
    assert forced.choice_token_ids == greedy.choice_token_ids == forced.known_token_ids
    torch.testing.assert_close(forced.hidden, greedy.hidden, rtol=1e-3, atol=1e-4)
    replays = [loaded.replay(each) for each in (greedy, forced)]
    assert [step.num_accepted for step in replays[0].steps] == [step.num_accepted for step in replays[1].steps]


def test_a_draft_that_is_the_target_diverges_by_nothing(pair):
    """And another one by something; over a reduced vocabulary both are shares of it."""
    for draft, low, high in (("same", 0.0, 1e-3), ("bad", 0.3, 1.0), ("reduced", 0.3, 1.0)):
        loaded = load(pair, draft, policy="full")
        trace = loaded.recorder().record(random_prompt(30), None, 10)
        found = [step.divergence for step in loaded.replay(trace, loaded.drafter.drafter).steps]
        assert found, draft
        assert all(each is not None and low <= each.total_variation <= high for each in found), draft


def test_divergence_by_hand():
    """Of (3/4, 1/4) from (1/4, 3/4)."""
    found = diverge(torch.tensor([3.0, 1.0]).log(), torch.tensor([1.0, 3.0]).log())
    assert found.total_variation == pytest.approx(0.5)
    assert found.kl == pytest.approx(0.5 * torch.tensor(3.0).log().item())
    assert diverge(torch.zeros(5), torch.zeros(5)) == Divergence(0, 0)


class Silent:
    """A drafter that proposes nothing, as a copying one does where nothing repeats."""

    hidden_layers, num_levels = (), 4

    def __init__(self) -> None:
        self.root = -1
        self.rows: set[int] = set()

    def admit(self, row, num_prompt_tokens, max_new_tokens):
        self.rows.add(row)
        return True

    def prefill(self, row, token_ids, hidden): ...

    def select(self, row, positions): ...

    def absorb(self, rows, decided):
        self.root = decided.token_ids[0][-1]

    def propose(self, rows):
        return roots_only([self.root], torch.device("cpu"))

    def release(self, row):
        self.rows.remove(row)


def test_any_drafter_can_be_replayed(pair):
    """Nothing but the protocol is used: one without levels, caches or a distribution takes a token a step."""
    loaded = load(pair, "good", policy="streaming")
    trace = loaded.recorder().record(random_prompt(40), None, 10)
    drafter = Silent()
    assert not isinstance(drafter, FirstLevel)
    replay = loaded.replay(trace, drafter)
    assert len(replay.steps) == trace.num_counted - 1
    assert not any(step.agrees or step.num_accepted or step.num_nodes or step.divergence for step in replay.steps)
    assert replay.stats == DecodingStats()
    assert not drafter.rows, "the row is given back"


def test_a_document_too_long_for_the_cache_is_an_error(pair):
    """One line, and the rows are free for the next one."""
    loaded = load(pair, "good", policy="full")
    free = loaded.target.cache.rows.num_free
    with pytest.raises(ValueError, match="does not fit the cache"):
        loaded.recorder().record([5] * (free + 1), None, 4)
    assert loaded.target.cache.rows.num_free == free
