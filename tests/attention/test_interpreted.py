"""The Triton kernels on a CPU: interpreted they are their twins in plain torch."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has wheels for Linux only")

ROOT = Path(__file__).parents[2]
SLOW = [pytest.mark.slow, pytest.mark.timeout(1800)]


@pytest.mark.parametrize(
    "files, marks",
    [
        (["interpreted_kernel.py", "interpreted_layer.py"], "not slow"),
        pytest.param(["interpreted_kernel.py"], "slow", marks=SLOW),
    ],
)
def test_interpreted_they_are_their_twins(files, marks):
    """Triton decides when it is imported whether it interprets kernels, so their tests need a process of their own."""
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    options = ["-q", "-m", marks, "-p", "no:cacheprovider", "--override-ini", "timeout=900"]
    command = [sys.executable, "-m", "pytest", *options, *(f"tests/attention/{file}" for file in files)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
