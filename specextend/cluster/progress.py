"""How far a run is, by work rather than by rows, and when it will end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from specextend.core import DocumentKey
from specextend.stats import DecodingStats, ratio

WINDOW_S = 600.0
"""Seconds of the past that the rate is taken from."""
REMEMBER_EVERY_S = 1.0
"""Seconds between two points of that past: a driver with hundreds of results a second would fill its memory with it."""
DEFAULT_OUTPUT_COST = 10.0
"""Cost of an output token in prompt tokens, until it is measured."""


@dataclass(frozen=True, slots=True)
class TokenEstimate:
    """Tokens of a document before it has run."""

    num_prompt_tokens: int
    max_new_tokens: int

    @property
    def total(self) -> int:
        """What the document takes at most, prompt and output."""
        return self.num_prompt_tokens + self.max_new_tokens


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there is to say now."""

    num_rows: int
    num_done: int
    num_errors: int
    num_running: int
    num_workers: int
    fraction: float
    """Of this start's work, 0 to 1."""
    output_tokens_per_s: float | None
    """Over the last ten minutes, all workers together."""
    mean_acceptance_length: float | None
    eta_s: float | None
    """None until something was finished."""


class Ledger:
    """Work done and left: prompt tokens + w x output tokens, w as measured. True counts replace estimates."""

    def __init__(self, estimates: Mapping[DocumentKey, TokenEstimate], num_done: int, num_errors: int) -> None:
        """`estimates`: of the documents this start has to do; the counts: rows of earlier starts."""
        self._open = dict(estimates)
        self._num_rows = len(estimates) + num_done + num_errors
        self._num_done, self._num_errors = num_done, num_errors
        self._prompt_left = sum(item.num_prompt_tokens for item in estimates.values())
        self._output_left = sum(item.max_new_tokens for item in estimates.values())
        self._output_allowed = 0
        self._stats = DecodingStats()
        self._running: dict[str, dict[DocumentKey, int]] = {}
        self._history: deque[tuple[float, int, int]] = deque()

    def finish(self, key: DocumentKey, stats: DecodingStats | None) -> None:
        """A document is done, with its true counts, or given up (None)."""
        estimate = self._open.pop(key)
        for outputs in self._running.values():
            outputs.pop(key, None)
        self._prompt_left -= estimate.num_prompt_tokens
        self._output_left -= estimate.max_new_tokens
        if stats is None:
            self._num_errors += 1
            return
        self._num_done += 1
        self._output_allowed += estimate.max_new_tokens
        self._stats.add(stats)

    def running(self, worker: str, outputs: Iterable[tuple[DocumentKey, int]]) -> None:
        """Documents in a worker's engine now, with their output tokens so far."""
        self._running[worker] = {key: tokens for key, tokens in outputs if key in self._open}

    @property
    def output_cost(self) -> float:
        """w: seconds of an output token over seconds of a prompt token."""
        stats = self._stats
        prefill = ratio(stats.prefill_s + stats.draft_prefill_s, stats.num_prompt_tokens)
        decode = ratio(stats.draft_s + stats.verify_s + stats.retrieval_s + stats.other_s, stats.num_output_tokens)
        return decode / prefill if prefill and decode else DEFAULT_OUTPUT_COST

    def snapshot(self, now: float, num_workers: int) -> Snapshot:
        """Take the state at `now`, in seconds of any monotonic clock; remembers it for the rate, once a second."""
        prompt, output = self._done_tokens()
        if not self._history or now - self._history[-1][0] >= REMEMBER_EVERY_S:
            self._history.append((now, prompt, output))
        while len(self._history) > 2 and self._history[1][0] <= now - WINDOW_S:
            self._history.popleft()
        then, prompt_then, output_then = self._history[0]
        cost, elapsed = self.output_cost, now - then
        done, left = prompt + cost * output, self._work_left(cost)
        rate = ratio(prompt - prompt_then + cost * (output - output_then), elapsed)
        return Snapshot(
            num_rows=self._num_rows,
            num_done=self._num_done,
            num_errors=self._num_errors,
            num_running=sum(map(len, self._running.values())),
            num_workers=num_workers,
            fraction=done / (done + left) if done + left else 1.0,
            output_tokens_per_s=ratio(output - output_then, elapsed),
            mean_acceptance_length=self._stats.mean_acceptance_length,
            eta_s=left / rate if rate else None,
        )

    def _done_tokens(self) -> tuple[int, int]:
        """Prompt and output tokens done by this start, those of running documents included."""
        prompt, output = self._stats.num_prompt_tokens, self._stats.num_output_tokens
        for estimate, tokens in self._begun():
            prompt += estimate.num_prompt_tokens
            output += tokens
        return prompt, output

    def _work_left(self, cost: float) -> float:
        """Outputs are taken to end as early, on average, as those that have ended."""
        share = self._stats.num_output_tokens / self._output_allowed if self._output_allowed else 1.0
        prompt, output = float(self._prompt_left), share * self._output_left
        for estimate, tokens in self._begun():
            prompt -= estimate.num_prompt_tokens
            output -= min(tokens, share * estimate.max_new_tokens)
        return max(0.0, prompt + cost * output)

    def _begun(self) -> list[tuple[TokenEstimate, int]]:
        """Running documents whose prefill is through, with their output tokens so far."""
        running = [item for outputs in self._running.values() for item in outputs.items()]
        return [(self._open[key], tokens) for key, tokens in running if tokens]
