"""Length buckets and spreads."""

from __future__ import annotations

import pytest

from specextend.report.statistics import bucket_name, bucket_of, spread


@pytest.mark.parametrize(
    ("num_tokens", "bucket", "name"),
    [(1, 512, "512"), (512, 512, "512"), (513, 1024, "1K"), (1024, 1024, "1K"), (4097, 8192, "8K")],
)
def test_a_bucket_is_named_after_its_upper_bound(num_tokens, bucket, name):
    """The bound belongs to the bucket, as in the data sets' own names."""
    assert (bucket_of(num_tokens), bucket_name(bucket)) == (bucket, name)


def test_a_spread_says_how_many_values_it_rests_on():
    """Missing values are left out, and do not count as zero."""
    measured = spread([1.0, None, 2.0, 6.0])
    assert measured is not None
    assert (measured.n, measured.median, measured.mean, measured.min, measured.max) == (3, 2.0, 3.0, 1.0, 6.0)
    assert measured.sd == pytest.approx(7**0.5)
    assert str(measured) == "2.00 (n=3, 1.00-6.00)"


def test_no_values_have_no_spread_and_one_value_no_deviation():
    """A figure that was not measured is not printed."""
    assert spread([None]) is None
    assert spread([2.0]).sd is None
