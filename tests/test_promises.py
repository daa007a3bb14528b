"""The table of promises in SECURITY.md: each row names its tests, and they exist. Without that a promise is a wish."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_every_promise_of_security_names_tests_that_exist():
    """A file without a test's name stands for all of its tests."""
    lines = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("| ")]
    promises = [line for line in lines if not line.startswith("| promise |")]
    assert len(promises) >= 8
    for line in promises:
        names = re.findall(r"`(\S+?\.py)(?:::(\w+))?`", line)
        assert names, f"{line} names no test"
        for path, name in names:
            assert f"def {name or 'test_'}" in (ROOT / path).read_text(), f"{path} has no {name}"
