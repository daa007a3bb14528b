"""The cases that stand for a whole product: every combination that is promised is there, in few of them."""

from __future__ import annotations

import itertools

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
