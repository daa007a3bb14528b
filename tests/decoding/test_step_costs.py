"""Costs of steps: lines through measurements, and their correction by the steps that are taken."""

from __future__ import annotations

import pytest

from specextend.decoding.step_costs import CostTable, StepCosts

TABLE = CostTable(
    {
        "dense": {1: (0.040, 10e-6), 4: (0.042, 12e-6), 16: (0.043, 14e-6)},
        "hybrid": {1: (0.040, 10e-6), 4: (0.045, 11e-6), 16: (0.046, 12e-6)},
    }
)


def test_a_batch_costs_its_rows_once_and_its_prefixes_each():
    """Four sequences of 4 rows: linear layers of 16 rows, attention four times."""
    assert TABLE.seconds("dense", 4, [1000] * 4) == pytest.approx(0.043 + 4 * 0.012)
    assert TABLE.seconds("dense", 16, [0] * 3) == pytest.approx(3 * 0.043), "beyond what was measured: by the row"


def test_the_faster_tree_attention_depends_on_the_length():
    """Dense saves 3 ms, hybrid 2 us a token: they meet at 1,500."""
    assert TABLE.tree_attention(16, [1400]) == "dense"
    assert TABLE.tree_attention(16, [1600]) == "hybrid"
    assert TABLE.tree_attention(16, [400, 1200]) == TABLE.tree_attention(16, [700, 700])


def test_steps_correct_the_table():
    """One size is dearer than measured, the other is not: both are found out."""
    costs = StepCosts(TABLE)
    tree, plain = costs.verify_s(16, [1000]), costs.verify_s(1, [1000])
    for _ in range(100):
        costs.observe_verify(16, [1000], 1.5 * tree)
        costs.observe_verify(1, [1000], plain)
    assert costs.verify_s(16, [1000]) == pytest.approx(1.5 * tree, rel=0.05)
    assert costs.verify_s(1, [1000]) == pytest.approx(plain, rel=0.05)


def test_drafting_costs_what_it_was_seen_to():
    """First calls build kernels: the least of the first few counts, then a running average."""
    costs = StepCosts(TABLE)
    assert costs.draft_s(1) == 0
    for seconds in (0.5, 0.010, 0.012):
        costs.observe_draft("propose", 1, seconds)
    costs.observe_draft("absorb", 1, 0.002)
    assert costs.draft_s(1) == pytest.approx(0.012)
    assert costs.draft_s(3) == costs.draft_s(1), "the nearest seen, until three were"
    costs.observe_draft("propose", 3, 0.020)
    assert costs.draft_s(3) == pytest.approx(0.022)
    for _ in range(80):
        costs.observe_draft("propose", 1, 0.015)
    assert costs.draft_s(1) == pytest.approx(0.017, rel=0.01)
