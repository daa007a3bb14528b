"""With `stop_repetition` a loop ends an output at the same token in every mode, with every draft and batch size."""

import pytest

from specextend.core import MIN_STOP_TOKENS, ends_in_loop
from tests.covering import covering
from tests.tiny_models import of_length, tiny_engine

LENGTHS = (40, 90, 15)
MAX_NEW_TOKENS = 160
MODES = ("autoregressive", "tree", "specextend")
DRAFTS = ("good", "bad", "ngram", "merged-good")


def outputs(engine, **sampling):
    requests = [of_length(length, MAX_NEW_TOKENS, **sampling) for length in LENGTHS]
    return {completion.request_id: completion for completion in engine.generate(requests)}


@pytest.fixture(scope="module")
def unstopped(looping_pair):
    """What plain decoding gives without the option."""
    return outputs(tiny_engine(looping_pair, decoding__mode="autoregressive"))


def first_loop(token_ids):
    return next(n for n in range(len(token_ids)) if ends_in_loop(token_ids[:n], MIN_STOP_TOKENS))


@pytest.mark.parametrize("mode, draft, batch", covering(MODES, DRAFTS, [3, 1], strength=1))
def test_a_loop_ends_the_output_at_the_same_token_whatever_decodes_it(mode, draft, batch, looping_pair, unstopped):
    """A step that accepts six tokens past the end of the loop keeps none of them."""
    engine = tiny_engine(looping_pair, draft, decoding__mode=mode, decoding__max_batch_size=batch)
    for name, completion in outputs(engine, stop_repetition=True).items():
        token_ids = unstopped[name].token_ids
        assert completion.token_ids == token_ids[: first_loop(token_ids)]
        assert completion.finish_reason == "repetition"
        assert completion.text == engine.tokenizer.decode(completion.token_ids)
