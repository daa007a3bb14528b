"""The formulas beside right answers: known values, and what must always hold."""

from collections import Counter
from math import comb

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.report.gold import bootstrap, kappa, mcnemar, wilson

COUNTS = st.integers(0, 60)


@pytest.mark.parametrize(
    "right, rows, low, high",
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (81, 263, 0.2553, 0.3662)],
)
def test_wilsons_interval_is_that_of_the_books(right, rows, low, high):
    """Newcombe (1998) has the last one."""
    assert wilson(right, rows) == pytest.approx([low, high], abs=1e-4)


def test_kappa_is_that_of_the_books():
    """Cohen's own example of two raters, and raters who agree by chance alone."""
    pairs = {("yes", "yes"): 20, ("yes", "no"): 5, ("no", "yes"): 10, ("no", "no"): 15}
    assert kappa(pairs) == pytest.approx(0.4)
    assert kappa(dict.fromkeys([(one, other) for one in "ab" for other in "ab"], 5)) == pytest.approx(0)
    assert kappa({("a", "a"): 3}) is None


@given(COUNTS, COUNTS)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_mcnemars_test_sums_the_binomial_tails(gained, lost):
    total = gained + lost
    tail = sum(comb(total, number) for number in range(min(gained, lost) + 1)) / 2**total
    assert mcnemar(gained, lost) == pytest.approx(min(1, 2 * tail))
    assert mcnemar(gained, lost) == mcnemar(lost, gained)


@given(st.lists(st.sampled_from([(1, 0), (0, 1), (0, 0)]), min_size=1, max_size=80))
@settings(max_examples=40, derandomize=True, deadline=None)
def test_a_bootstrap_holds_the_difference_between_its_ends(changes):
    found = Counter(changes)
    low, high = bootstrap(found[1, 0], found[0, 1], len(changes))
    difference = (found[1, 0] - found[0, 1]) / len(changes)
    assert -1 <= low <= difference <= high <= 1
