"""The soak of `scripts/soak.py`, shorter: enough documents for some kills of workers and of the driver."""

from __future__ import annotations

from collections import Counter

import pytest

from scripts.soak import Soak, SoakOptions

pytestmark = pytest.mark.slow


def test_whatever_is_killed_whenever_every_document_is_summarized_once(tmp_path):
    """Other tests kill one thing at a moment they choose; here the moments choose themselves.

    And one of the three places kills every worker that is handed a document there. How many kills that makes is a
    matter of the machine's speed: on a fast one the two sound places finish before the sick one has its next worker.
    """
    record = Soak(SoakOptions(documents=120, workers=3, every=20, folder=tmp_path)).run()
    assert record["exact"], record
    assert record["is_success"]
    assert record["num_rows_in_parts"] >= record["num_summaries"] == 120
    victims = Counter(kill["victim"] for kill in record["kills"])
    assert victims["worker"] + victims["driver"] >= 2
    assert victims["sick"] >= 1
    assert record["exit_codes"][-1] == 0
