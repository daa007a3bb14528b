"""What the tests of prompts that begin alike are compared with."""

from __future__ import annotations

import pytest

from tests.decoding.prompts import run
from tests.tiny_models import tiny_engine


@pytest.fixture(scope="module")
def pair(pairs):
    return pairs("llama")


@pytest.fixture(scope="module")
def alone(pair):
    """What a prompt gives in an engine that has read nothing before, without a draft."""
    engine = tiny_engine(pair, decoding__mode="autoregressive")
    known = {}

    def token_ids(prompt):
        if (name := tuple(prompt)) not in known:
            known[name] = run(engine, prompt)[0].token_ids
        return known[name]

    return token_ids
