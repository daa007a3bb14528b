"""The Triton kernels on a CPU: interpreted they are their twins in plain torch."""

import sys

import pytest

from tests.job.conftest import environment, ran

pytest.importorskip("triton", reason="triton has wheels for Linux only")


@pytest.mark.parametrize(
    "marks", ["not slow", pytest.param("slow", marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
def test_interpreted_they_are_their_twins(marks):
    """Triton decides when it is imported whether it interprets kernels, so their tests need a process of their own."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-m",
        marks,
        "-p",
        "no:cacheprovider",
        "tests/attention/interpreted.py",
    ]
    ran(*command, env=environment() | {"TRITON_INTERPRET": "1"}).exits(0)
