import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.workload import make_plan
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.inputs import InputOptions
from specextend.data.prompts import PromptOptions, Prompts
from specextend.data.source import open_source
from specextend.models.causal_lm import load_tokenizer
from specextend.requests.tasks import Task
from tests.cluster.conftest import MODELS
from tests.contract.test_configuration import LEAST


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(MODELS / "target"))


def source(folder, columns, **options):
    pq.write_table(pa.table(columns), folder / "input.parquet", row_group_size=2)
    return open_source(InputOptions(path=str(folder / "input.parquet"), **options))


def planned(source, tokenizer, limit=1000, **options):
    prompts = Prompts(tokenizer, PromptOptions(**options), limit)
    config = RunConfig.from_values(LEAST | {"decoding": {"max_new_tokens": 10}})
    task = Task("", config.model_copy(update={"input": source.options}), prompts)
    return make_plan(source, [task], {DocumentKey(0, row) for row in range(source.num_rows)})


def num_tokens_of(text, tokenizer):
    return len(Prompts(tokenizer, PromptOptions(), 1 << 20).render(text, 10).token_ids)


def test_estimates_are_close_to_what_a_document_takes(tmp_path, tokenizer):
    """They order the work and feed the time left; the sample makes them fit language and tokenizer. A row's own limit
    overrides the run's.
    """
    texts = ["summer rain on the roof " * count for count in (1, 5, 20)]
    corpus = source(tmp_path, {"text": texts, "length": pa.array([None, None, 99])}, options_column="length")
    estimates = planned(corpus, tokenizer).estimates
    for estimate, text, max_new_tokens in zip(estimates.values(), texts, (10, 10, 99), strict=True):
        true = pytest.approx(num_tokens_of(text, tokenizer), rel=0.1)
        assert estimate == (true, max_new_tokens)


def test_an_over_long_document_in_parts_counts_as_all_that_is_decoded_for_it(tmp_path, tokenizer):
    """Its parts, their summaries and the merge: deadlines follow from it, and the longest documents begin first."""
    corpus = source(tmp_path, {"text": ["word " * 2_000, "word"]})
    plan = planned(corpus, tokenizer, limit=210, length_policy="parts")
    num_tokens = num_tokens_of("word " * 2_000, tokenizer)
    long, short = plan.estimates.values()
    assert plan.num_over_length == 1
    assert short.max_new_tokens == 10
    assert long.max_new_tokens > 10 * num_tokens / 200
    assert 1.1 * num_tokens < long.num_prompt_tokens < 2 * num_tokens


def test_an_over_long_document_counts_as_what_is_kept_of_it(tmp_path, tokenizer):
    """A gigabyte of text is cut to the context: it must not stand for a day of work."""
    corpus = source(tmp_path, {"text": ["word " * 10_000] * 2})
    assert planned(corpus, tokenizer, limit=100).estimates.num_prompt_tokens[0] == 90
    shorter = planned(corpus, tokenizer, limit=100, max_prompt_tokens=50)
    assert shorter.estimates.num_prompt_tokens[0] == 50
