"""What one side's decoding of one document yields: tokens, counts and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specextend.stats import DecodingStats, ratio


@dataclass(frozen=True, slots=True)
class Measurement:
    """Tokens, counts and seconds of one document decoded greedily."""

    token_ids: list[int]
    decode_s: float
    """From the first token to the last."""
    total_s: float
    """From the start to the last token."""
    num_steps: int
    """Forward passes of the target after prefill."""
    num_first_tokens: int = 1
    """Number of tokens when `decode_s` begins: more than one if the pass over the prompt verifies a guess too."""
    stats: DecodingStats | None = None
    """Statistics of our engine."""

    @property
    def prefill_s(self) -> float:
        """Return the seconds in which the target read the prompt."""
        return self.total_s - self.decode_s if self.stats is None else self.stats.prefill_s

    @property
    def num_decoded_tokens(self) -> int:
        """Count the tokens decoded in `decode_s`."""
        return len(self.token_ids) - self.num_first_tokens

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Compute decoded tokens per second; None if there are none."""
        return ratio(self.num_decoded_tokens, self.decode_s) if self.num_decoded_tokens else None

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """Compute output tokens per second, prefill included."""
        return ratio(len(self.token_ids), self.total_s)

    @property
    def tokens_per_step(self) -> float | None:
        """Compute decoded tokens per forward pass of the target: 1 in plain decoding."""
        return ratio(self.num_decoded_tokens, self.num_steps)


class Side(Protocol):
    """One way to decode a document greedily."""

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure."""
