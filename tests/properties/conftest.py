"""Hundreds of small runs, each in a folder of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from specextend.cluster.exits import Interrupt


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """No power fails in these tests: waiting for the disk is most of what they would do."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def interrupt() -> Iterator[Interrupt]:
    """Never told to stop."""
    interrupt = Interrupt(600.0)
    yield interrupt
    interrupt.disarm()
