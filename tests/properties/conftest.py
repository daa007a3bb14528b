"""Hundreds of small runs, each in a folder of its own."""

import os

import pytest

from specextend.cluster.exits import Interrupt


@pytest.fixture(autouse=True)
def _no_disk(monkeypatch):
    """No power fails in these tests: waiting for the disk is most of what they would do."""
    monkeypatch.setattr(os, "fsync", lambda handle: None)


@pytest.fixture(scope="module")
def interrupt():
    """Never told to stop."""
    interrupt = Interrupt(600.0)
    yield interrupt
    interrupt.disarm()
