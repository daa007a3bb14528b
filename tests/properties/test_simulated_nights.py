"""A night with nodes that are reclaimed and nodes of two speeds, as `scripts/scale_driver.py` runs it, only smaller."""

from scripts.scale_driver import DriverScale, run_night


def test_every_document_is_done_once_and_none_is_charged():
    """Two of four nodes are reclaimed, one of them without notice, and two are a quarter as fast."""
    options = DriverScale(documents=1000, workers=32, rate=5.0, spot=2, slow=0.5)
    night = run_night(options)
    assert night["done"] == 1000
    assert night["rows_committed"] == 1000
    assert night["errors"] == 0
    assert night["charged"] == 0
