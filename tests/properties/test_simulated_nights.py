"""A night with nodes that are reclaimed and nodes of two speeds, as `scripts/scale_driver.py` runs it, only smaller."""

from __future__ import annotations

import re

import pytest

from scripts import scale_driver
from scripts.scale_driver import DriverScale, run_night


def test_every_document_is_done_once_and_none_is_charged() -> None:
    """Two of four nodes are reclaimed, one of them without notice, and two are a quarter as fast."""
    options = DriverScale(documents=1000, workers=32, rate=5.0, spot=2, slow=0.5)
    night = run_night(options)
    assert (night["done"], night["rows_committed"], night["errors"]) == (1000, 1000, 0)
    assert night["charged"] == 0


def test_no_more_nodes_are_reclaimed_than_there_are() -> None:
    """The example in the script's help asked for twenty of eight, and ended in a traceback."""
    with pytest.raises(ValueError, match="--spot must be at most 8, the nodes of 64 workers"):
        DriverScale(workers=64, spot=9)
    [example] = re.findall(r"night --workers (\d+) --documents (\d+) --spot (\d+)", str(scale_driver.__doc__))
    workers, documents, spot = map(int, example)
    assert DriverScale(workers=workers, documents=documents, spot=spot).num_nodes == 8
