"""Whatever retrieval trusts, output is the target's own: layers, heads, borders of chunks and refreshing."""

from __future__ import annotations

from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specextend.decoding.chunks import Cutter
from specextend.decoding.options import CacheOptions
from specextend.stats import DecodingStats
from tests.reference_outputs import Ties, generate
from tests.tiny_models import (
    EOS_TOKEN_ID,
    FAMILIES,
    SECTIONS,
    VOCABULARY,
    Pair,
    load_reference,
    random_prompt,
    request,
    tiny_engine,
    write_pair,
)

PROMPT_LENGTHS = (300, 37, 129)
CHOICES: list[dict[str, Any]] = [
    {"score_layers": [0]},
    {"score_layers": [0, 1, -1], "score_heads": "max"},
    {"chunk_boundaries": "sentence"},
    {"chunk_boundaries": "sentence", "score_heads": "max", "score_layers": [1], "refresh_every": 1},
]


def sentence_tokenizer() -> PreTrainedTokenizerFast:
    """The tiny tokenizer, but that every seventh word ends a sentence."""
    vocabulary = {f"t{i}." if i % 7 == 3 else f"t{i}": i for i in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{EOS_TOKEN_ID}")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    pair = write_pair(tmp_path_factory.mktemp("llama"), FAMILIES["llama"])
    for folder in (pair.target, pair.drafts["good"]):
        sentence_tokenizer().save_pretrained(folder)
    return pair


@pytest.fixture(scope="module")
def references(pair):
    model = load_reference(pair)
    return {length: generate(model, random_prompt(length), 40) for length in PROMPT_LENGTHS}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("draft", ["good", "eagle"])
@pytest.mark.parametrize("choice", CHOICES, ids=lambda choice: "-".join(map(str, choice.values())))
def test_output_is_the_targets_own(choice, draft, batch, pair, references):
    """A selection decides what the draft sees, never what is said."""
    changes = {f"cache__{key}": value for key, value in choice.items()}
    engine = tiny_engine(pair, draft, decoding__max_batch_size=batch, **changes)
    ties, total = Ties(), DecodingStats()
    for completion in engine.generate([request(str(n), random_prompt(n), 40) for n in PROMPT_LENGTHS[:batch]]):
        ties.assert_equal(completion.token_ids, references[int(completion.request_id)], f"{choice}, {draft}")
        total.add(completion.stats)
    assert not ties.found
    assert total.num_retrievals > batch
    assert total.retrieval_coverage < 0.95, "much of the prompt is hidden, or this would prove little"


def test_these_prompts_have_sentences():
    """Or the matrix above would cut them as any."""
    options = {**SECTIONS["cache"], "chunk_boundaries": "sentence"}
    cutter = Cutter(CacheOptions(**options), sentence_tokenizer(), VOCABULARY)
    prompt = random_prompt(300)
    edges = cutter.cut(prompt).edges(300).tolist()
    ending = [prompt[edge - 1] % 7 == 3 for edge in edges[1:-1]]
    assert sum(ending) > len(ending) / 3
    assert len(edges) - 1 > 300 // 8 + 1
