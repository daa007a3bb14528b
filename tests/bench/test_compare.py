"""The statistics of a benchmark, on measurements made up so that the figures can be worked out by hand."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import pytest

from specextend.bench.compare import Record, agreement, figures, first_difference, run_rounds, speed_ratios, step_ms
from specextend.bench.measurement import Measurement
from specextend.bench.sides import EngineSide
from specextend.bench.tree_sizes import TreeGrid
from specextend.bench.workload import BenchDocument
from specextend.core import Completion, Request
from specextend.stats import DecodingStats
from tests.bench.made_up import ROOF


def document(doc_id: str, num_tokens: int = 600) -> BenchDocument:
    return BenchDocument(doc_id, 1024 if num_tokens > 512 else 512, [1] * num_tokens)


def measured(num_tokens: int, decode_s: float, total_s: float, stats: DecodingStats | None = None) -> Measurement:
    return Measurement([*range(num_tokens)], decode_s, total_s, num_tokens - 1, stats=stats)


class ScriptedSide:
    """Answers with the measurements it was given, in their order, and writes down who was asked when."""

    def __init__(self, name: str, diary: list[tuple[str, int, int]], measurements: list[Measurement]) -> None:
        self.name, self.diary, self.measurements = name, diary, iter(measurements)

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        self.diary.append((self.name, len(prompt_token_ids), max_new_tokens))
        return next(self.measurements)


class FakeEngine:
    """Decodes three tokens, with the statistics of a real engine."""

    def generate(self, source: Iterable[Request | None]) -> Iterator[Completion]:
        for request in source:
            assert request is not None
            stats = DecodingStats(num_output_tokens=3, num_plain_steps=2, ttft_s=1.0, decode_s=0.5)
            yield Completion(request.request_id, [5, 6, 7], "text", "length", stats)


RECORDS = [
    Record(document("a"), {"specextend": measured(11, 1.0, 2.0), "autoregressive": measured(11, 2.0, 4.0)}),
    Record(document("b", 300), {"specextend": measured(21, 1.0, 2.0), "autoregressive": measured(21, 4.0, 8.0)}),
]


def test_sides_take_turns_in_going_first():
    """Machines slow down when they get warm: the last side must not always be the same one."""
    diary: list[tuple[str, int, int]] = []
    sides = {name: ScriptedSide(name, diary, [measured(2, 1, 2)] * 5) for name in "xyz"}
    documents = [document(str(i)) for i in range(4)]
    records = [*run_rounds(sides, documents, 64, lambda line: None)]
    assert "".join(name for name, _, _ in diary[3:]) == "xyzyzxzxyxyz"
    assert [[*record.measurements] for record in records] == [["x", "y", "z"]] * 4


def test_every_side_is_warmed_up_on_the_shortest_document_first():
    """The first run of a kernel or an allocator measures something else."""
    diary: list[tuple[str, int, int]] = []
    sides = {name: ScriptedSide(name, diary, [measured(2, 1, 2)] * 3) for name in "xy"}
    lines: list[str] = []
    [*run_rounds(sides, [document("long", 900), document("short", 300)], 64, lines.append)]
    assert diary[:2] == [("x", 300, 16), ("y", 300, 16)]
    assert diary[2:4] == [("x", 900, 64), ("y", 900, 64)]
    assert lines[-1].startswith("2/2 short: x 1.0")


def test_a_ratio_is_taken_document_by_document():
    """A ratio of means would let the longest output decide."""
    decoding = speed_ratios(RECORDS, "specextend", "autoregressive", "decode_tokens_per_s")
    assert decoding is not None
    assert (decoding.n, decoding.min, decoding.max, decoding.mean) == (2, 2.0, 4.0, 3.0)
    assert decoding.sd == pytest.approx(2**0.5)


def test_decode_speed_leaves_the_first_token_out_and_end_to_end_does_not():
    """The first token comes from prefill."""
    assert RECORDS[0].measurements["specextend"].decode_tokens_per_s == 10.0
    assert RECORDS[0].measurements["specextend"].end_to_end_tokens_per_s == 5.5


def test_tokens_that_came_with_prefill_are_no_decoding():
    """Prompt lookup verifies its first guess in the pass over the prompt; its tokens are not decoding's merit."""
    lookup = Measurement([*range(12)], decode_s=2.0, total_s=3.0, num_steps=4, num_first_tokens=4)
    assert lookup.decode_tokens_per_s == 4.0
    assert lookup.tokens_per_step == 2.0
    assert lookup.end_to_end_tokens_per_s == 4.0


def test_the_bucket_with_the_lowest_ratio_is_named():
    """A median over all documents hides the length at which speculation loses."""
    found = figures(RECORDS, ROOF)
    lowest = found["lowest_bucket"]["specextend/autoregressive"]
    assert lowest["decode_tokens_per_s"] == {"bucket": "1K", "median": 2.0}
    assert found["buckets"]["512"]["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"]["median"] == 4.0


def test_every_side_is_put_over_every_base():
    """Ratios to our own plain decoding, to transformers, to its prompt lookup and to llama.cpp, from one run."""
    names = ["autoregressive", "specextend", "merged", "transformers", "transformers-lookup", "llama.cpp"]
    found = figures([Record(document("a"), {name: measured(11, 1.0, 2.0) for name in names})], ROOF)
    for base in ("autoregressive", "transformers", "transformers-lookup", "llama.cpp"):
        assert all(f"{name}/{base}" in found["all"]["ratios"] for name in names if name != base)
    assert [*found["agreement"]] == [f"{name}/autoregressive" for name in names if name != "autoregressive"]


LOOP = [1, 2, 3] + [7, 8] * 15
"""An output that ends in a loop of 30 tokens."""


def looping(doc_id: str, num_tokens: int = 600) -> Record:
    """A document that loops in plain decoding; its speculative output may end otherwise."""
    measurements = {"specextend": measured(33, 0.1, 1.0), "autoregressive": Measurement(LOOP, 3.2, 4.2, 32)}
    return Record(document(doc_id, num_tokens), measurements)


def test_documents_that_loop_are_counted_apart():
    """A loop is what n-grams guess best: a few of them would carry the figures of a whole bucket."""
    found = figures([*RECORDS, looping("c")], ROOF)
    without = figures(RECORDS, ROOF)
    for figure in ("all", "buckets", "lowest_bucket"):
        assert found[figure] == without[figure]
    assert without["loops"] is None
    assert found["loops"]["documents"] == 1
    assert found["loops"]["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"]["median"] == 32.0
    assert [each["loops"] for each in found["documents"]] == [False, False, True]
    assert found["agreement"]["specextend/autoregressive"]["documents"] == 3


def test_a_final_eos_does_not_hide_a_loop():
    """An output that repeats a sentence ten times and then stops has looped all the same."""
    record = Record(document("a"), {"autoregressive": Measurement([*LOOP, 0], 1.0, 2.0, 33)})
    assert record.loops


def test_a_bucket_of_loops_has_no_figures_of_its_own():
    """It says so; it does not vanish, and no other bucket is taken for it."""
    found = figures([looping("long"), RECORDS[1]], ROOF)
    assert found["buckets"]["1K"]["documents"] == 0
    assert found["buckets"]["1K"]["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"] is None
    assert found["buckets"]["512"]["documents"] == found["all"]["documents"] == 1
    assert found["lowest_bucket"]["specextend/autoregressive"]["decode_tokens_per_s"]["bucket"] == "512"
    json.dumps(found, allow_nan=False)


def test_shares_of_the_machine_follow_from_bytes_and_operations():
    """Worked out by hand: 32 steps that read 10 MB of weights and 1,000 bytes of each of 616.5 tokens, in 3.2 s."""
    side = figures([looping("a")], ROOF)["loops"]["sides"]["autoregressive"]
    assert side["read_share"] == pytest.approx(32 * (10_000_000 + 616_500) / 1e9 / 3.2)
    flop = 2 * (600 * 4_000_000 + 1_000_000) + 100 * 600 * 601 / 2
    assert side["matrix_share"] == pytest.approx(flop / 1e12 / 1.0)


def test_an_output_of_one_token_has_no_decode_speed():
    """It is left out of n; it is not infinitely fast, nor slow, though the clock goes on a little after it."""
    records = [*RECORDS, Record(document("c"), {name: measured(1, 1e-6, 1.0) for name in RECORDS[0].measurements})]
    found = figures(records, ROOF)["all"]
    assert found["documents"] == 3
    assert found["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"]["n"] == 2
    assert found["ratios"]["specextend/autoregressive"]["end_to_end_tokens_per_s"]["n"] == 3


def test_figures_are_given_by_length_and_for_all():
    """And nothing in them is beyond JSON."""
    found = figures(RECORDS, ROOF)
    assert [*found["buckets"]] == ["512", "1K"]
    assert found["buckets"]["512"]["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"]["median"] == 4.0
    assert found["buckets"]["512"]["ratios"]["specextend/autoregressive"]["decode_tokens_per_s"]["sd"] is None
    assert [each["doc_id"] for each in found["documents"]] == ["a", "b"]
    json.dumps(found, allow_nan=False)


@pytest.mark.parametrize(
    ("a", "b", "index"),
    [([1, 2], [1, 2], None), ([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [7], 0)],
)
def test_first_difference(a, b, index):
    """An output that stops earlier differs where it stops."""
    assert first_difference(a, b) == index


def test_agreement_counts_first_differences():
    """One different token changes all that follow: only the first tells something."""
    other = Measurement([0, 1, 2, 99, 98], 1.0, 2.0, 4)
    records = [RECORDS[0], Record(document("c"), {"specextend": measured(5, 1, 2), "autoregressive": other})]
    assert agreement(records, "specextend", "autoregressive") == {
        "documents": 2,
        "equal": 1,
        "first_differences": {"c": 3},
    }


def test_acceptance_of_many_documents_is_that_of_all_their_steps():
    """Sums first, division last; a side without statistics says nothing of acceptance."""
    short = DecodingStats(num_spec_steps=1, num_accepted_tokens=3, acceptance_histogram=[0, 0, 0, 1], verify_s=0.1)
    long = DecodingStats(
        num_plain_steps=4, num_spec_steps=9, num_accepted_tokens=2, acceptance_histogram=[7, 2], verify_s=0.9
    )
    records = [
        Record(document("a"), {"specextend": measured(5, 1, 2, short), "transformers": measured(5, 1, 2)}),
        Record(document("b"), {"specextend": measured(5, 1, 2, long), "transformers": measured(5, 1, 2)}),
    ]
    sides = figures(records, ROOF)["all"]["sides"]
    assert sides["specextend"]["mean_acceptance_length"] == 1.5
    assert sides["specextend"]["acceptance_histogram"] == [7, 2, 0, 1]
    assert (sides["specextend"]["num_spec_steps"], sides["specextend"]["num_plain_steps"]) == (10, 4)
    assert sides["specextend"]["step_ms"]["verify"] == pytest.approx(1000 / 14)
    assert sides["specextend"]["time_shares"]["verify"] == 1.0
    assert "mean_acceptance_length" not in sides["transformers"]


def test_a_step_without_steps_has_no_length():
    """An output of one token took none."""
    assert set(step_ms(DecodingStats()).values()) == {None}


def test_the_engine_is_measured_by_its_own_clock():
    """First to last token, as its rows report it."""
    measurement = EngineSide(FakeEngine()).run([1, 2], 3)
    assert (measurement.token_ids, measurement.decode_s, measurement.total_s) == ([5, 6, 7], 0.5, 1.5)
    assert (measurement.decode_tokens_per_s, measurement.num_steps) == (4.0, 2)


def test_a_grid_holds_every_combination():
    """A tree that cannot be is refused before anything is loaded."""
    assert len(TreeGrid(nodes=(1, 2), depths=(1, 2, 3), thresholds=(0.0,)).trees()) == 6
    with pytest.raises(ValueError, match="nodes"):
        TreeGrid(nodes=(0,)).trees()
