"""The cases that stand for a whole product: every combination that is promised is there, in few of them."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.covering import covering


@settings(max_examples=60)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.integers(1, 3))
def test_any_values_of_so_many_axes_meet_in_a_case(sizes, strength):
    """A pair that no case has would be a combination that no test ever runs."""
    strength = min(strength, len(sizes))
    axes = [[f"{axis}-{value}" for value in range(size)] for axis, size in enumerate(sizes)]
    cases = covering(*axes, strength=strength)
    assert len(set(cases)) == len(cases)
    for chosen in itertools.combinations(range(len(axes)), strength):
        met = {tuple(case[axis] for axis in chosen) for case in cases}
        assert met == set(itertools.product(*(axes[axis] for axis in chosen)))


@pytest.mark.parametrize(
    ("sizes", "strength", "most"),
    [((9, 5, 2, 2, 2, 12), 2, 120), ((4, 4, 5, 2), 2, 24), ((3, 4, 5), 1, 5), ((3, 4), 2, 12)],
)
def test_there_are_few_cases(sizes, strength, most):
    """The two largest axes set the least number; a fifth more is what a greedy choice costs."""
    assert len(covering(*map(range, sizes), strength=strength)) <= most


def test_cases_are_the_same_every_time_and_hold_the_values_themselves():
    """Workers of one test run must collect the same cases; values need no hash."""
    axes = [[0], [0, 5]], [{"a": 1}, {"a": 2}, {"a": 3}]
    assert covering(*axes) == covering(*axes)
    assert all(case[0] in axes[0] and case[1] in axes[1] for case in covering(*axes))
