from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import fs

from scripts.simulated_store import SimulatedStore
from specextend.cluster.estimates import Estimates, RowSet, TokenEstimate
from specextend.cluster.planning import SAMPLE_BYTES, SAMPLE_SIZE, Plan, make_plan
from specextend.core import DocumentKey
from specextend.data.inputs import InputOptions
from specextend.data.plan_record import PlanRecord
from specextend.data.prompts import PromptOptions, Prompts
from specextend.data.run_folder import equal_texts_file, plan_file
from specextend.data.source import Source, open_source
from specextend.data.storage import Location, resolve, write_bytes
from specextend.models import load_tokenizer
from tests.cluster.conftest import MODELS


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return load_tokenizer(str(MODELS / "target"))


def source(folder: Path, columns: dict[str, Any], **options: Any) -> Source:
    pq.write_table(pa.table(columns), folder / "input.parquet", row_group_size=2)
    return open_source(InputOptions(path=str(folder / "input.parquet"), **options))


def planned(source: Source, tokenizer: Any, rows: set[int] | None = None, limit: int = 1000, **options: Any) -> Plan:
    prompts = Prompts(tokenizer, PromptOptions(**options), limit)
    keys = {DocumentKey(0, row) for row in (rows if rows is not None else range(source.num_rows))}
    return make_plan(source, prompts, keys, 10, 0, lambda: None)


def test_estimates_are_close_to_what_a_prompt_takes(tmp_path: Path, tokenizer: Any):
    """They order the work and feed the time left; the sample makes them fit language and tokenizer."""
    texts = ["summer rain on the roof " * count for count in (1, 5, 20)]
    corpus = source(tmp_path, {"text": texts})
    plan = planned(corpus, tokenizer)
    prompts = Prompts(tokenizer, PromptOptions(), 1000)
    for row, text in enumerate(texts):
        true = len(prompts.render(text, 10).token_ids)
        assert plan.estimates[DocumentKey(0, row)].num_prompt_tokens == pytest.approx(true, rel=0.1)
        assert plan.estimates[DocumentKey(0, row)].max_new_tokens == 10


def test_an_over_long_document_in_parts_counts_as_all_that_is_decoded_for_it(tmp_path: Path, tokenizer: Any):
    """Its parts, their summaries and the merge: deadlines follow from it, and the longest documents begin first."""
    corpus = source(tmp_path, {"text": ["word " * 2_000, "word"]})
    plan = planned(corpus, tokenizer, limit=210, length_policy="chunk")
    num_tokens = len(Prompts(tokenizer, PromptOptions(), 1 << 20).render("word " * 2_000, 10).token_ids)
    long, short = (plan.estimates[DocumentKey(0, row)] for row in (0, 1))
    assert plan.num_over_length == 1
    assert short.max_new_tokens == 10
    assert long.max_new_tokens > 10 * num_tokens / 200
    assert 1.1 * num_tokens < long.num_prompt_tokens < 2 * num_tokens


def test_an_over_long_document_counts_as_what_is_kept_of_it(tmp_path: Path, tokenizer: Any):
    """A gigabyte of text is cut to the context: it must not stand for a day of work."""
    corpus = source(tmp_path, {"text": ["word " * 10_000] * 2})
    assert planned(corpus, tokenizer, limit=100).estimates[DocumentKey(0, 0)].num_prompt_tokens == 90
    shorter = planned(corpus, tokenizer, limit=100, max_prompt_tokens=50)
    assert shorter.estimates[DocumentKey(0, 0)].num_prompt_tokens == 50


def test_rows_with_values_of_their_own_are_taken_at_their_word(tmp_path: Path, tokenizer: Any):
    """A column of token counts spares the pass over the text; a column of lengths overrides the run's."""
    columns = {"text": ["a", "b"], "tokens": [700, 300], "length": pa.array([None, 99], pa.int32())}
    corpus = source(tmp_path, columns, num_tokens_column="tokens", max_new_tokens_column="length")
    plan = planned(corpus, tokenizer)
    template = Prompts(tokenizer, PromptOptions(), 1000).num_template_tokens
    assert plan.estimates[DocumentKey(0, 0)] == TokenEstimate(700 + template, 10)
    assert plan.estimates[DocumentKey(0, 1)] == TokenEstimate(300 + template, 99)
    assert plan.tokens_per_byte is None


def test_a_document_without_a_token_count_is_measured_like_any_other(tmp_path: Path, tokenizer: Any):
    """Counted as nothing it had the deadline of an empty document, and its turn at the very end."""
    columns = {"text": ["rain on the roof " * 40] * 3, "tokens": pa.array([None, 7, 0], pa.int32())}
    plan = planned(source(tmp_path, columns, num_tokens_column="tokens"), tokenizer)
    prompts = Prompts(tokenizer, PromptOptions(), 1000)
    true = len(prompts.render(columns["text"][0], 10).token_ids)
    found = [plan.estimates[DocumentKey(0, row)].num_prompt_tokens for row in range(3)]
    assert found == [pytest.approx(true, abs=1), 7 + prompts.num_template_tokens, pytest.approx(true, abs=1)]
    assert plan.tokens_per_byte is not None


def test_a_sample_is_cut_between_characters(tmp_path: Path, tokenizer: Any):
    """Half a character would be a token of its own, and no bytes of the text."""
    whole = planned(source(tmp_path, {"text": ["x" + "é" * (SAMPLE_BYTES // 2 - 1)]}), tokenizer)
    cut = planned(source(tmp_path, {"text": ["x" + "é" * SAMPLE_BYTES]}), tokenizer)
    assert cut.tokens_per_byte == whole.tokens_per_byte


def test_only_rows_that_are_left_are_planned(tmp_path: Path, tokenizer: Any):
    """A resumed run is ordered and measured by what it still has to do."""
    corpus = source(tmp_path, {"text": ["a", "b", "c"]})
    assert set(planned(corpus, tokenizer, rows={1}).estimates) == {DocumentKey(0, 1)}


def test_rows_that_will_be_refused_are_counted_and_take_no_time(tmp_path: Path, tokenizer: Any):
    """They still are documents: each becomes an error row."""
    corpus = source(tmp_path, {"text": ["a", None, "  "]})
    plan = planned(corpus, tokenizer)
    assert plan.rejected == {"NullText": 1, "EmptyText": 1}
    assert plan.estimates[DocumentKey(0, 1)].total == 0
    assert len(plan.estimates) == 3


def test_documents_over_the_prompt_limit_are_counted(tmp_path: Path, tokenizer: Any):
    """Under the policy `error` they are the rows that will fail, under the others those that are cut."""
    columns = {"text": ["a", "b"], "tokens": [10, 5000]}
    corpus = source(tmp_path, columns, num_tokens_column="tokens")
    assert planned(corpus, tokenizer).num_over_length == 1


def test_the_sample_is_seeded_and_small(tmp_path: Path, tokenizer: Any):
    """Two starts of a run order its documents alike; a million documents are not tokenized twice."""
    num_rows, prompts = 3 * SAMPLE_SIZE, Prompts(tokenizer, PromptOptions(), 1000)
    corpus = source(tmp_path, {"text": [f"{'x' * row} y" for row in range(1, num_rows + 1)]})
    checkpoints: list[None] = []
    keys = [DocumentKey(0, row) for row in range(num_rows)]
    plan = make_plan(corpus, prompts, keys, 10, 0, lambda: checkpoints.append(None))
    assert len(checkpoints) == num_rows + SAMPLE_SIZE, "one for each row, and one for each text that is tokenized"
    assert plan.tokens_per_byte == planned(corpus, tokenizer).tokens_per_byte


COLUMNS = {
    "text": ["summer rain " * 5, None, "", "snow", b"\xff", "summer rain " * 5],
    "tokens": pa.array([None, 3, None, 40, 0, None], pa.int32()),
    "length": pa.array([None, 7, 0, 9, None, None], pa.int32()),
}


@pytest.mark.parametrize(
    "options", [{}, {"num_tokens_column": "tokens"}, {"max_new_tokens_column": "length"}], ids=lambda each: str(each)
)
def test_a_resumed_run_plans_from_the_record_and_reads_no_text(tmp_path: Path, tokenizer: Any, options: dict[str, str]):
    """Ten million texts were read again by every start, for hours if the store is far away."""
    text = pa.array([each.encode() if isinstance(each, str) else each for each in COLUMNS["text"]], pa.binary())
    columns = COLUMNS | {"text": text.cast(pa.string(), safe=False)}
    local = source(tmp_path, columns, **options)
    store = SimulatedStore(latency_s=0.0)
    root = Location(fs.PyFileSystem(store), local.root.path)
    corpus, output = Source(local.options, root, local.files, ()), resolve(str(tmp_path / "output"))
    prompts, keys = Prompts(tokenizer, PromptOptions(), 1000), {DocumentKey(0, row) for row in range(6)}
    plans, bytes_read = [], []
    for fingerprint in ("a run", "a run", "another run"):
        before = store.tally.bytes_read
        record = PlanRecord(corpus, output, fingerprint)
        equal = record.equal_texts()
        plans.append(make_plan(record, prompts, keys, 10, 0, lambda: None, equal))
        record.keep(plans[-1].tokens_per_byte, equal)
        bytes_read.append(store.tally.bytes_read - before)
    assert plans[0] == plans[1] == plans[2]
    assert dict(plans[0].equal) == {DocumentKey(0, 0): [(DocumentKey(0, 5), "input.parquet:5")]}
    assert (len(plans[0].estimates), plans[0].num_rows) == (5, 6), "a copy is no document to decode"
    assert bytes_read[0] > 0
    assert bytes_read[1] == 0
    assert bytes_read[2] == bytes_read[0], "a record of another input is of no use"


@pytest.mark.parametrize("place", [plan_file, equal_texts_file])
@pytest.mark.parametrize("content", [b"", b"PAR1 and no more"])
def test_a_record_that_cannot_be_read_is_replaced(tmp_path: Path, content: bytes, place: Callable[..., Location]):
    """It says nothing that the input does not say."""
    corpus, output = source(tmp_path, {"text": ["rain"] * 2}), resolve(str(tmp_path / "output"))
    for tokens_per_byte, texts in ((0.5, [b"rain"] * 2), (0.6, [b"rain"] * 2), (0.7, [None] * 2)):
        record = PlanRecord(corpus, output, "a run")
        equal, rows = record.equal_texts(), list(record.scan())
        for row in rows:
            equal.add(row)
        record.keep(tokens_per_byte, equal)
        assert [row.text for row in rows] == texts
        assert equal.table()["row"].to_pylist() == [1]
        if tokens_per_byte == 0.5:
            write_bytes(place(output), content)
    assert record.tokens_per_byte == 0.6


def test_a_row_that_no_file_has_is_in_no_set_of_rows():
    """Somebody copied a part of another run there: the end of the run says so, and the start must not fail before."""
    rows = RowSet([2, 3], [DocumentKey(1, 2), DocumentKey(0, 1)])
    assert list(rows) == [DocumentKey(0, 1), DocumentKey(1, 2)]
    assert DocumentKey(1, 2) in rows
    assert not any(key in rows for key in (DocumentKey(1, 3), DocumentKey(2, 0), DocumentKey(1, -1)))


def test_documents_are_counted_by_length():
    """What a dry run shows of a corpus."""
    sizes = [1, 512, 513, 40_000]
    estimates = {DocumentKey(0, row): TokenEstimate(size, 10) for row, size in enumerate(sizes)}
    plan = Plan(Estimates.of(estimates), None, Counter(), 0)
    assert plan.buckets() == {"up to 512": 2, "513 to 1024": 1, "over 32768": 1}
    assert plan.num_prompt_tokens() == sum(sizes)
