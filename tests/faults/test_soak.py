"""The soak of `scripts/soak.py`, shorter: enough documents for some kills of workers and of the driver."""

from collections import Counter

import pytest

from scripts.soak import Soak, SoakOptions

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def soak(documents, folder):
    """A soak after which all is as it should be; returns who was killed how often."""
    record = Soak(SoakOptions(documents=documents, workers=3, every=documents // 6, folder=folder)).run()
    assert record["exact"], record
    assert record["is_success"]
    assert record["num_rows_in_parts"] >= record["num_summaries"] == documents
    assert record["exit_codes"][-1] == 0
    return Counter(kill["victim"] for kill in record["kills"])


def test_whatever_is_killed_whenever_every_document_is_summarized_once(tmp_path):
    """Other tests kill one thing at a moment they choose; here the moments choose themselves.

    And one of the three places kills every worker that is handed a document there. How many kills that makes is a
    matter of the machine's speed: on a fast one the two sound places finish before the sick one has its next worker.
    Then it takes more documents, which give it the time.
    """
    soaks = (soak(documents, tmp_path) for documents in (120, 480, 1920))
    assert any(victims["worker"] + victims["driver"] >= 2 and victims["sick"] >= 1 for victims in soaks)
