"""Settings of a training, and its examples: prompts, and the target's answers and states.

The target answers with the run's sampling, since drafts must predict such answers.

Shapes: `T` tokens, `C` hidden size, `V` vocabulary of the draft.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.config import RunConfig
from specextend.core import Completion, Request, Values
from specextend.data.instructions import Around
from specextend.data.parquet import CHECKED, write_table
from specextend.data.prompts import Prompts
from specextend.data.storage import atomic_output, resolve
from specextend.decoding.decoding_options import DraftOptions, at_least
from specextend.decoding.device import traits_of
from specextend.decoding.model import CachedModel
from specextend.models.loading import load_engine
from specextend.requests.rounds import document_seed
from specextend.stats import DecodingStats

Show = Callable[..., None]
"""Takes the name of a stage, its progress, its total, any detail."""


@dataclass(frozen=True, kw_only=True)
class TrainOptions:
    """Settings of a whole training. Lengths are in tokens."""

    start_from: str = ""
    """Folder of a draft by `specextend train` to continue, with its shape and vocabulary; empty: a
    new draft.
    """
    num_rounds: int = 4
    """Most rounds of answers, training and evaluation."""
    num_answers: int = 256
    """Answers of the target that each round adds."""
    min_tokens: int = 1024
    """Shortest piece of a document to answer; shorter documents are unused."""
    max_tokens: int = 5120
    """Longest piece of a document to answer."""
    vocabulary: int = 8192
    """Number of tokens that the draft can propose: all special tokens and the most frequent tokens
    of the text.
    """
    copy_heads: int = 2
    """Number of KV heads that look up earlier occurrences of the last tokens."""
    num_epochs: int = 4
    """Epochs of each round over all recordings so far."""
    learning_rate: float = 4e-4
    """Peak learning rate."""
    seed: int = 0
    """Seed of pieces and training."""

    def __post_init__(self) -> None:
        least = {"copy_heads": 0, "vocabulary": 16}
        least |= dict.fromkeys(("num_rounds", "num_answers", "min_tokens", "num_epochs"), 1)
        for name, value in least.items():
            at_least(name, getattr(self, name), value)
        if self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be at most max_tokens ({self.max_tokens}), got {self.min_tokens}"
            )
        if self.learning_rate <= 0:
            raise ValueError(f"learning_rate must be above 0, got {self.learning_rate}")


class Text(NamedTuple):
    """A document of the corpus."""

    token_ids: Tensor
    """[T] int32"""
    instruction: Around | None = None


class Answer(NamedTuple):
    """A prompt and the target's answer."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]


class PromptMaker:
    """Makes prompts of documents, determined by a seed."""

    def __init__(
        self, tokenizer: Any, prompts: Prompts, options: TrainOptions, max_new_tokens: int
    ):
        """Check the room for prompts.

        Raises:
            ValueError: The target's context is too short for a piece and an answer.
            DocumentError: As in `Prompts.room`.
        """
        self._tokenizer = tokenizer
        self._prompts = prompts
        self._options = options
        self._answer_tokens = max_new_tokens
        room = prompts.room(max_new_tokens)
        if room < options.min_tokens:
            raise ValueError(
                f"the target's context has room for pieces of {max(0, room)} tokens, fewer than "
                f"min_tokens ({options.min_tokens}); choose smaller values"
            )
        self._most = min(options.max_tokens, room)

    def prompt(self, text: Text, number: int, *, whole: bool) -> list[int]:
        """Make a prompt of a document, if asked for and not too long, or of a random piece."""
        short = whole and len(text.token_ids) <= self._most
        piece = (
            text.token_ids.tolist()
            if short
            else self._piece(text, Random(f"{self._options.seed}/own/{number}"))
        )
        return self._prompts.render(
            self._tokenizer.decode(piece), self._answer_tokens, text.instruction
        ).token_ids

    def _piece(self, text: Text, random: Random) -> list[int]:
        least = self._options.min_tokens
        most = min(self._most, len(text.token_ids))
        size = min(most, round(least * (most / least) ** random.random()))
        first = random.randrange(len(text.token_ids) - size + 1)
        piece: list[int] = text.token_ids[first : first + size].tolist()
        return piece


class Recording(NamedTuple):
    """A prompt, its answer, and the target's hidden states."""

    token_ids: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, C] after the final norm, as the LM head reads it."""
    shares: Tensor
    """[T] fp32: the target's probability of the draft's vocabulary, an upper bound for drafts."""
    is_answer: Tensor
    """False for the prompt."""

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        with atomic_output(resolve(str(path))) as temporary:
            save_file(
                {name: tensor.contiguous() for name, tensor in self._asdict().items()}, temporary
            )

    @staticmethod
    def load(path: Path) -> Recording:
        """Read a file of `save`."""
        return Recording(**load_file(path))


@torch.inference_mode()
def record(target: CachedModel, vocabulary: Tensor, answer: Answer) -> Recording:
    """Record a prompt and its answer, for which the target's cache has rows.

    Args:
        vocabulary: Token ids [V] of the draft.
    """
    tokens = torch.tensor(answer.prompt_token_ids + answer.output_token_ids)
    places = torch.arange(len(tokens))
    device = target.device
    vocabulary = vocabulary.to(device)
    hidden = []
    shares = []
    for positions in places.split(traits_of(device).prefill_chunk):
        plan = AttentionPlan([0], [int(positions[-1]) + 1], len(positions))
        chunk = tokens[positions][None].to(device)
        hidden.append(target.forward(chunk, positions[None].to(device), plan)[0])
    states = torch.cat(hidden)
    for each in states.split(256):
        logits = target.logits(each).float()
        shares.append((logits[:, vocabulary].logsumexp(1) - logits.logsumexp(1)).exp())
    return Recording(
        tokens, states.cpu(), torch.cat(shares).cpu(), places >= len(answer.prompt_token_ids)
    )


# Answers of the target, and evaluation of drafts


ROWS = 32
"""Answers in a file, all lost if a training is killed."""
TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema(
    [("number", "int64"), ("prompt_token_ids", TOKENS), ("output_token_ids", TOKENS)]
)


def read_answers(folder: Path) -> dict[int, Answer]:
    """Read all answers in a folder, by number."""
    tables = (pq.read_table(file, schema=SCHEMA, **CHECKED) for file in folder.glob("*.parquet"))
    rows = (row for table in tables for row in table.to_pylist())
    return {row["number"]: Answer(row["prompt_token_ids"], row["output_token_ids"]) for row in rows}


def add_answers(
    config: RunConfig, prompts: Mapping[int, list[int]], folder: Path, show: Show
) -> None:
    """Let the target answer prompts, and write answers into the folder as they come."""
    rows: list[Values] = []
    try:
        for done, completion in _answered(config, prompts):
            number = int(completion.request_id)
            tokens = {"prompt_token_ids": prompts[number], "output_token_ids": completion.token_ids}
            rows.append({"number": number} | tokens)
            show("answers", done, len(prompts))
            if len(rows) == ROWS:
                _write(rows, folder)
                rows = []
    finally:
        _write(rows, folder)


def tokens_per_step(config: RunConfig, prompts: Mapping[int, list[int]], show: Show) -> float:
    """Measure the mean acceptance length over prompts, with trees of a fixed size."""
    if config.tree.nodes == "auto":  # it follows the machine's speed
        config = config.model_copy(
            update={"tree": replace(config.tree, nodes=config.tree.most_drafts)}
        )
    stats = DecodingStats()
    found = 1.0
    for done, completion in _answered(config, prompts):
        stats.add(completion.stats)
        found = stats.mean_acceptance_length or 1.0
        show("evaluation", done, len(prompts), f", {found:.3f} tokens per step")
    return found


def with_draft(config: RunConfig, folder: Path | None) -> RunConfig:
    """Set the draft, or n-grams before there is one."""
    if folder is None:
        draft = DraftOptions(kind="ngram")
    else:
        draft = DraftOptions(
            kind="eagle", model=str(folder), ngram=config.draft is not None and config.draft.ngram
        )
    return config.model_copy(
        update={"draft": draft, "decoding": replace(config.decoding, mode="specextend")}
    )


def _answered(
    config: RunConfig, prompts: Mapping[int, list[int]]
) -> Iterator[tuple[int, Completion]]:
    """Answer prompts with the run's options, a seed each; count the answers."""
    options = config.decoding
    requests = (
        Request(
            request_id=str(number),
            prompt_token_ids=token_ids,
            max_new_tokens=options.max_new_tokens,
            sampling=options.sampling(document_seed(options.seed, f"answer {number}")),
            schema=config.output.json_schema or "",
        )
        for number, token_ids in prompts.items()
    )
    return enumerate(load_engine(config).generate(requests), start=1)


def _write(rows: list[Values], folder: Path) -> None:
    if rows:
        write_table(
            resolve(str(folder / f"{rows[0]['number']:06}.parquet")),
            pa.Table.from_pylist(rows, SCHEMA),
        )
