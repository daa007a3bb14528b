"""The rungs of the memory ladder; what they bring is in tests/faults/test_engine.py."""

from __future__ import annotations

from specextend.decoding.admission import MemoryLadder


def test_a_step_of_many_never_raises_what_a_prefill_has_lowered():
    """A prefill that wants to be alone ends with one at a time; those that still run must not undo that."""
    ladder = MemoryLadder(8, 0, 32)
    assert ladder.lower("prefill", 32, 6)
    assert ladder.batch_size == 1
    assert ladder.lower("step", 5, 5)
    assert ladder.batch_size == 1
