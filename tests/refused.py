"""Refusals: what a user reads of an error."""

import pytest


def refused(call, *arguments, kind=ValueError, **options):
    """The one line in which a call is refused."""
    with pytest.raises(kind) as error:
        call(*arguments, **options)
    line = str(error.value)
    assert "\n" not in line
    return line
