"""Plots of unusual runs."""

from __future__ import annotations

from typing import Any
from xml.etree import ElementTree

import pytest

from specextend.report.plots import draw_plots

NOTHING: dict[str, Any] = {"acceptance": {"at_least": []}, "buckets": [], "timeline": []}
TEXT = "{http://www.w3.org/2000/svg}text"


def texts(report: dict[str, Any]) -> list[str]:
    """What the only plot of a report says; raises for invalid XML."""
    [plot] = draw_plots(report)
    return ["".join(element.itertext()) for element in ElementTree.fromstring(plot.svg).iter(TEXT)]


def line(**worker: Any) -> dict[str, Any]:
    times = {"asked_s": 1.0, "begun_s": None, "ready_s": None, "gone_s": None}
    known = {"worker": "worker-1", "seat": 1, "device": None, **times, "reason": None, "documents": 0, "spans": []}
    return {"run_id": "a", "seconds": 7200.0, "seats_left_out": 0, "workers": [known | worker]}


@pytest.mark.parametrize("depth", [1, 60])
def test_deep_trees_fit_a_small_plot(depth: int):
    """Drafts of n-grams may be sixty tokens deep; sixty numbers side by side cannot be read."""
    report = NOTHING | {"acceptance": {"at_least": [1 - step / (depth + 1) for step in range(depth + 1)]}}
    said = texts(report)
    assert "% of speculative steps" in said
    assert len(said) < 45


@pytest.mark.parametrize(
    "worker",
    [
        {},
        {"begun_s": 2.0, "gone_s": 4.0, "reason": "it could not be built"},
        {"seat": None, "worker": "ho$t$:1\u202e北<b>", "spans": [[5.0, 6.0, 1]]},
    ],
    ids=range(3),
)
def test_a_worker_is_drawn_whatever_is_known_of_it(worker: dict[str, Any]):
    """Drivers are killed at any moment; a name is text, whatever is in it."""
    said = texts(NOTHING | {"timeline": [line(**worker)]})
    assert "minutes since the start" in said
    assert ("seat 1" in said) or (r"ho$t$:1\u202e\u5317<b>"[:24] in said)
