"""The soak of `scripts/soak.py`, shorter: enough documents for some kills of workers and of the driver."""

from __future__ import annotations

import pytest

from scripts.soak import Soak, SoakOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_whatever_is_killed_whenever_every_document_is_summarized_once(tmp_path):
    """Other tests kill one thing at a moment they choose; here the moments choose themselves."""
    record = Soak(SoakOptions(documents=120, workers=3, every=20, folder=tmp_path)).run()
    assert record["exact"], record
    assert record["is_success"]
    assert record["num_rows_in_parts"] >= record["num_summaries"] == 120
    assert len(record["kills"]) >= 4
    assert record["exit_codes"][-1] == 0
