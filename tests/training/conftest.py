"""A target that reads bytes, so that texts come back from its tokens as they were, and documents for it."""

from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from specextend.data.inputs import InputOptions
from specextend.data.source import open_source
from specextend.training.distil import distil
from specextend.training.recording import Recording, TrainOptions
from tests.tiny_models import FAMILIES, spelling_tokenizer, tiny_config, tiny_model, write_model

WORDS = ("river", "report", "county", "bridge", "water", "budget", "council", "annual", "road", "storm", "repair")


def document(number, num_words=60):
    return " ".join(Random(number).choices(WORDS, k=num_words))


def write_texts(path, texts):
    pq.write_table(pa.table({"text": texts}), path)
    return path


OPTIONS = TrainOptions(
    num_rounds=2,
    num_answers=8,
    vocabulary=18,
    min_tokens=192,
    max_tokens=256,
    num_epochs=4,
    learning_rate=2e-3,
)


@dataclass(frozen=True)
class Workshop:
    """A target and some text."""

    target: str
    text: Path

    def config(self, **changes):
        return tiny_config(self, "ngram", decoding__max_new_tokens=8, **changes)

    def train(self, output, show=lambda *progress: None, **changes):
        options = replace(OPTIONS, **changes)
        return distil(self.config(), open_source(InputOptions(path=str(self.text))), options, output, show)


@pytest.fixture(scope="session")
def workshop(tmp_path_factory):
    """Its tokens are bytes and three special ones."""
    folder = tmp_path_factory.mktemp("training")
    target = write_model(tiny_model(FAMILIES["llama-tied-llama3"], 0, 259), folder / "target", spelling_tokenizer)
    return Workshop(str(target), write_texts(folder / "texts.parquet", [document(i, 200) for i in range(8)]))


def made_up_recording(vocab_size, hidden_size):
    """A prompt of 24 tokens and an answer of 9, with states that no target has made."""
    generator = torch.Generator().manual_seed(0)
    token_ids = torch.randint(vocab_size, (33,), generator=generator)
    hidden = torch.randn(33, hidden_size, generator=generator)
    return Recording(token_ids, hidden, torch.ones(33), torch.arange(33) >= 24)
