"""What drafts learn from: prompts around documents and pieces of them, and the target's states at its answers.

The target's own answers, which `own_answers.py` collects, are what a draft will be asked for. The target reads each
once behind its prompt, and its hidden states are kept in a file.

Shapes: `T` tokens, `C` hidden size, `V` vocabulary of the draft.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.attention.plan import AttentionPlan
from specextend.data.instructions import Around
from specextend.data.prompts import Prompts
from specextend.data.storage import atomic_output, resolve
from specextend.decoding.device import traits_of
from specextend.decoding.model import CachedModel
from specextend.training.task import TrainOptions


@dataclass(frozen=True)
class Text:
    """A document of the corpus."""

    token_ids: Tensor
    """[T] int32"""
    instruction: Around | None = None
    """Its own; None: the run's."""


@dataclass(frozen=True)
class Answer:
    """A prompt and the target's own answer to it."""

    prompt_token_ids: list[int]
    output_token_ids: list[int]


class PromptMaker:
    """Makes prompts of documents; the same seed gives the same."""

    def __init__(self, tokenizer: Any, prompts: Prompts, options: TrainOptions, max_new_tokens: int):
        """Check that the target's context has room for the shortest piece and an answer.

        Raises ValueError if it has not, and DocumentError as `Prompts.room` does.
        """
        self._tokenizer, self._prompts, self._options = tokenizer, prompts, options
        self._answer_tokens = max_new_tokens
        room = prompts.room(max_new_tokens)
        if room < options.min_tokens:
            raise ValueError(
                f"the target's context has room for pieces of {max(0, room)} tokens, fewer than min_tokens "
                f"({options.min_tokens}); choose smaller values"
            )
        self._most = min(options.max_tokens, room)

    def prompt(self, text: Text, number: int, *, whole: bool) -> list[int]:
        """Make the run's prompt of a document: of the whole document if asked for, or of a random piece.

        A document that is longer than the longest piece is never answered whole.
        """
        short = whole and len(text.token_ids) <= self._most
        piece = text.token_ids.tolist() if short else self._piece(text, Random(f"{self._options.seed}/own/{number}"))
        return self._prompts.render(self._tokenizer.decode(piece), self._answer_tokens, text.instruction).token_ids

    def _piece(self, text: Text, random: Random) -> list[int]:
        """Cut a piece out of a document; short ones are as frequent as long ones on a logarithmic scale."""
        least, most = self._options.min_tokens, min(self._most, len(text.token_ids))
        size = min(most, round(least * (most / least) ** random.random()))
        first = random.randrange(len(text.token_ids) - size + 1)
        piece: list[int] = text.token_ids[first : first + size].tolist()
        return piece


@dataclass(frozen=True)
class Recording:
    """The tokens of a prompt and of the answer behind it, and the target's hidden states at them."""

    token_ids: Tensor
    """[T] int64"""
    hidden: Tensor
    """[T, C] the last, after the final norm, as the LM head reads it"""
    shares: Tensor
    """[T] fp32 probability that the target gives to the draft's vocabulary: a draft can learn no more than that"""
    is_answer: Tensor
    """[T] bool: False for the prompt, which comes first"""

    def save(self, path: Path) -> None:
        """Write a safetensors file atomically."""
        with atomic_output(resolve(str(path))) as temporary:
            save_file({field.name: getattr(self, field.name).contiguous() for field in fields(self)}, temporary)

    @staticmethod
    def load(path: Path) -> Recording:
        """Read what `save` wrote."""
        return Recording(**load_file(path))


class Recorder:
    """Records answers with a target whose cache has rows for the longest of them, with its prompt."""

    def __init__(self, target: CachedModel, vocabulary: Tensor):
        """Take the target, and the token ids [V] that the draft proposes."""
        self._target, self._vocabulary = target, vocabulary.to(target.device)

    @torch.inference_mode()
    def record(self, answer: Answer) -> Recording:
        """Record a prompt and the answer behind it."""
        tokens = torch.tensor(answer.prompt_token_ids + answer.output_token_ids)
        places, device = torch.arange(len(tokens)), self._target.device
        hidden, shares = [], []
        for positions in places.split(traits_of(device).prefill_chunk):
            plan = AttentionPlan([0], [int(positions[-1]) + 1], len(positions))
            chunk = tokens[positions][None].to(device)
            hidden.append(self._target.forward(chunk, positions[None].to(device), plan)[0])
        states = torch.cat(hidden)
        for each in states.split(256):
            logits = self._target.logits(each).float()
            shares.append((logits[:, self._vocabulary].logsumexp(1) - logits.logsumexp(1)).exp())
        return Recording(tokens, states.cpu(), torch.cat(shares).cpu(), places >= len(answer.prompt_token_ids))
