"""What one side did with one document, in counts and seconds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from specextend.stats import DecodingStats, ratio


@dataclass(frozen=True, slots=True)
class Measurement:
    """One document, decoded greedily."""

    token_ids: list[int]
    decode_s: float
    """First token to last."""
    total_s: float
    """Start to last token."""
    num_steps: int
    """Forward passes of the target after prefill."""
    num_first_tokens: int = 1
    """Tokens there when `decode_s` begins: more than one where the pass over the prompt verifies a guess as well."""
    stats: DecodingStats | None = None
    """Of our engine."""

    @property
    def num_decoded_tokens(self) -> int:
        """Tokens that came in `decode_s`."""
        return len(self.token_ids) - self.num_first_tokens

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens after the first ones per second; None where there are none."""
        return ratio(self.num_decoded_tokens, self.decode_s) if self.num_decoded_tokens else None

    @property
    def end_to_end_tokens_per_s(self) -> float | None:
        """All tokens, prefill included."""
        return ratio(len(self.token_ids), self.total_s)

    @property
    def tokens_per_step(self) -> float | None:
        """Tokens that a forward pass of the target brought, none past the end: 1 in plain decoding."""
        return ratio(self.num_decoded_tokens, self.num_steps)


class Side(Protocol):
    """One way to decode a document greedily."""

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure."""
