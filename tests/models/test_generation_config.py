"""What a model's generation config asks besides ends: done as transformers does it, or named."""

import shutil
from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.checks import check_run
from specextend.models.causal_lm import load_tokenizer, read_facts
from specextend.models.model_files import ModelError
from specextend.models.pairing import describe_asks
from tests.models.conftest import edit_json
from tests.reference_outputs import generate, tokens_of
from tests.refused import refused
from tests.tiny_models import in_mode, load_reference, random_prompt, request, tiny_config, tiny_engine

MAX_NEW_TOKENS = 40
PROMPTS = {str(length): random_prompt(length) for length in (60, 25, 300)}
PENALTIES = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
NEUTRAL = {"num_beams": 1, "length_penalty": 1.0, "min_length": 0, "temperature": 0.6, "sequence_bias": None}
MODES = {"autoregressive": "good", "retrieval": "merged-good"}


@pytest.fixture(scope="module")
def plain(references):
    """What transformers gives without any of it."""
    return {name: references("llama", int(name), MAX_NEW_TOKENS).token_ids for name in PROMPTS}


@pytest.fixture(scope="module")
def asking(pair, plain, tmp_path_factory):
    """The pair, whose target's generation config asks for penalties, and never to write five of its usual tokens."""
    target = tmp_path_factory.mktemp("asking") / "target"
    shutil.copytree(pair.target, target)
    suppressed = [*dict.fromkeys(plain["60"])][:5]
    edit_json(target / "generation_config.json", **PENALTIES, suppress_tokens=[*suppressed, 10**6], **NEUTRAL)
    return replace(pair, target=str(target))


def changed(pair, **changes):
    """What transformers gives by itself, after changes of the generation config that it found."""
    model = load_reference(pair)
    model.generation_config.update(**changes)
    return {name: generate(model, prompt, MAX_NEW_TOKENS).token_ids for name, prompt in PROMPTS.items()}


@pytest.fixture(scope="module")
def own(asking):
    return changed(asking)


def outputs(engine, **sampling):
    return tokens_of(engine.generate([request(*each, MAX_NEW_TOKENS, **sampling) for each in PROMPTS.items()]))


@pytest.mark.parametrize("mode", MODES)
def test_what_a_model_asks_is_done_in_every_mode(mode, asking, own, plain):
    """As transformers does it by itself: most users of such a model have never seen an output without."""
    changes = {"attention__backend": "sdpa", "decoding__max_batch_size": 3}
    engine = tiny_engine(asking, MODES[mode], **changes, **in_mode(mode))
    assert outputs(engine) == own
    assert own != plain


def test_a_request_that_sets_a_penalty_gets_its_own(asking, own):
    """1 and 0 switch off what the model asks; what it never writes stays so."""
    off = {"repetition_penalty": 1.0, "no_repeat_ngram_size": 0}
    found = outputs(tiny_engine(asking, attention__backend="sdpa", decoding__max_batch_size=3), **off)
    assert found == changed(asking, **off)
    assert found != own


def test_what_a_model_asks_is_said_at_the_start_and_kept_in_the_manifest(asking, tmp_path):
    """What is not done above all: a word that the model's makers forbid is then no fault of the model."""
    target = tmp_path / "target"
    shutil.copytree(asking.target, target)
    edit_json(target / "generation_config.json", bad_words_ids=[[7]], min_new_tokens=4, remove_invalid_values=True)
    [line] = describe_asks(read_facts(str(target)))
    assert line == (
        f"{target} asks in its generation_config.json for repetition_penalty 1.3, no_repeat_ngram_size 2, "
        "suppress_tokens (5): done, where decoding.* says nothing else; "
        "bad_words_ids, min_new_tokens, remove_invalid_values: not done"
    )
    pq.write_table(pa.table({"text": ["t5 t6 t7"]}), tmp_path / "in.parquet")
    places = {"input__path": f"{tmp_path}/in.parquet", "output__path": f"{tmp_path}/out"}
    prepared = check_run(tiny_config(replace(asking, target=str(target)), **places))
    assert line in prepared.notes
    assert prepared.manifest["models"]["target"]["asks"] == line


def test_a_model_that_asks_nothing_gets_no_line(write_model):
    """Sampling and lengths are the configuration's, and neutral values ask nothing."""
    folder = write_model()
    edit_json(folder / "generation_config.json", **NEUTRAL, repetition_penalty=1.0, do_sample=True, max_length=20)
    assert [*describe_asks(read_facts(str(folder)))] == []


@pytest.mark.parametrize(
    "values",
    [{"repetition_penalty": 0}, {"repetition_penalty": "1.1"}, {"suppress_tokens": ["a"]}, {"suppress_tokens": 3}],
)
def test_what_cannot_be_understood_is_refused(write_model, values):
    """To leave it out would be another model's output."""
    folder = write_model()
    edit_json(folder / "generation_config.json", **values)
    assert "generation_config.json cannot be followed: " in refused(read_facts, str(folder), kind=ModelError)


def test_the_dropout_of_a_tokenizer_is_off(write_model):
    """BPE leaves out merges at random while a model is trained: a document would be other tokens each time."""
    folder = write_model()
    tokenizer = load_tokenizer(str(folder))
    text = tokenizer.decode([63] * 20)
    tokenizer.backend_tokenizer.model.dropout = 0.5
    assert len({tuple(tokenizer.encode(text)) for _ in range(9)}) > 1
    tokenizer.save_pretrained(folder)
    assert load_tokenizer(str(folder)).encode(text) == [63] * 20
