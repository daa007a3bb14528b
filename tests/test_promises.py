"""Tables of promises in the documents: each row names its tests, and they exist. Without that a promise is a wish."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("document", "head", "at_least"), [("SECURITY.md", "promise", 8), ("docs/reliability.md", "fault", 30)]
)
def test_every_promise_names_tests_that_exist(document: str, head: str, at_least: int):
    """A path without a folder lies in `tests/faults/`; a file without a test's name stands for all of its tests."""
    lines = [line for line in (ROOT / document).read_text().splitlines() if line.startswith("| ")]
    promises = [line for line in lines if not line.startswith(f"| {head} |")]
    assert len(promises) >= at_least
    for line in promises:
        names = re.findall(r"`(\S+?\.py)(?:::(\w+))?`", line)
        assert names, f"{line} names no test"
        for path, name in names:
            text = (ROOT / (path if "/" in path else f"tests/faults/{path}")).read_text()
            assert f"def {name or 'test_'}" in text, f"{path} has no {name}"
