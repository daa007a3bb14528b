"""An object store that takes calls and never answers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.test_refusals import black_hole
from tests.contract.test_refusals import corpus as corpus
from tests.contract.test_refusals import silent as silent
from tests.job.conftest import summarize


@pytest.mark.parametrize(("what", "store_s"), [("--input", 1), pytest.param("--output", 10, marks=pytest.mark.slow)])
def test_a_store_that_never_answers_the_first_call_is_exit_1(
    corpus: Path, tmp_path: Path, silent: int, what: str, store_s: int
):
    """Without a network Google's client tries for a quarter of an hour, once for every call.

    A local input is asked before the output, and must not be the one that is slow.
    """
    paths = {"--input": str(corpus), "--output": str(tmp_path / "out")} | {what: black_hole(silent)}
    arguments = [part for pair in paths.items() for part in pair]
    ended = summarize(*arguments, "--set", "input.id_column=doc", "--set", f"job.store_s={store_s}")
    assert ended.code == 1
    [line] = ended.stderr.splitlines()
    assert line.startswith(f"error: {what[2:]}.path gs://anonymous@bucket/in")
    assert line.endswith(f"cannot be reached: no answer for {store_s} s; run again")
