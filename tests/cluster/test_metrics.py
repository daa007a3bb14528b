"""What a run exports, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
import time
import urllib.request
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.metrics import COUNTED, COUNTERS, GAUGES, HISTOGRAMS
from specextend.stats import PHASES
from tests.cluster.conftest import ROOT
from tests.cluster.fakes import SpeculatingEngine

DASHBOARD = ROOT / "deploy" / "grafana" / "specextend.json"
GOOD = [f"text number {number}" for number in range(4)]
LONGEST_S = 600
Series = tuple[str, tuple[tuple[str, str], ...]]
"""A metric's name and the labels that choose its series."""


def exported_names() -> set[str]:
    """The series that a scrape of Ray can find, as Prometheus writes them."""
    names = {f"ray_specextend_{name}_total" for name in COUNTERS} | {f"ray_specextend_{name}" for name in GAUGES}
    return names | {f"ray_specextend_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def queries() -> list[str]:
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    return [target["expr"] for panel in panels for target in panel.get("targets", [])]


def test_the_dashboard_asks_for_what_a_run_exports_and_for_all_of_it():
    """A renamed metric leaves an empty panel that nobody misses until the night it is needed."""
    asked = {name for query in queries() for name in re.findall(r"ray_specextend_\w+", query)}
    assert asked <= exported_names()
    unseen = exported_names() - asked
    assert all(name.endswith(("_sum", "_count", "_bucket")) for name in unseen), "show it, or do not export it"
    for name in unseen:
        stem = name.rsplit("_", 1)[0]
        assert {f"{stem}_sum", f"{stem}_bucket"} & asked, f"nobody looks at {stem}"


def test_every_query_of_the_dashboard_is_about_the_chosen_runs():
    """Ray keeps the series of runs that have ended for as long as their cluster lives."""
    for query in queries():
        selectors = re.findall(r"ray_specextend_\w+(\{[^}]*\})?", query)
        assert selectors
        assert all('run_id=~"$run_id"' in selector for selector in selectors), query


def scrape() -> list[Sample]:
    """Our series, as Prometheus would read them from the node's metrics port."""
    own = ray.get_runtime_context().get_node_id()
    [port] = [node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == own]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        text = answer.read().decode()
    families = text_string_to_metric_families(text)
    return [sample for family in families for sample in family.samples if sample.name.startswith("ray_specextend_")]


def value(samples: list[Sample], name: str, run_id: str, **labels: str) -> float:
    """The sum of a run's series that have these labels."""
    wanted = (labels | {"run_id": run_id}).items()
    return sum(
        sample.value
        for sample in samples
        if sample.name == f"ray_specextend_{name}" and sample.labels.items() >= wanted
    )


def scrape_until(run_id: str, expected: dict[Series, float], least_output_tokens: float) -> list[Sample]:
    """Ray passes metrics on every ten seconds, and may do so while a run is raising one counter after the other.

    least_output_tokens: those of lost attempts, of which nobody knows how many there are, come on top.
    """
    give_up_at = time.monotonic() + LONGEST_S
    while True:
        samples = scrape()
        shown = {(name, labels): value(samples, name, run_id, **dict(labels)) for name, labels in expected}
        num_output_tokens = value(samples, "output_tokens_total", run_id)
        if shown == pytest.approx(expected) and num_output_tokens >= least_output_tokens:
            return samples
        wanted = f"wanted {expected} and {least_output_tokens} output tokens"
        assert time.monotonic() < give_up_at, f"{wanted}, Ray shows {shown} and {num_output_tokens}"
        time.sleep(0.5)


def series(name: str, **labels: str) -> Series:
    return name, tuple(labels.items())


@pytest.mark.slow
def test_ray_exports_every_metric_with_its_true_value(job, tmp_path: Path):
    """The dashboard's source: a real run with an error row and a lost worker, read from a real metrics port."""
    run = job([*GOOD, "raise", f"kill:{tmp_path}/killed"], workers=2)
    assert run.run(SpeculatingEngine) == EXIT_TOO_MANY_ERRORS
    run_id, done = run.screen.run_id, run.summaries().values()
    expected = {
        series("documents_total", outcome="done"): len(done),
        series("documents_total", outcome="failed"): 1,
        series("errors_total", error_class="ValueError"): 1,
        series("worker_deaths_total", cause="died"): 1,
        **{series(f"{name}_total"): total(done, f"num_{name}") for name in COUNTED},
        **{series("busy_seconds_total", phase=phase.removesuffix("_s")): total(done, phase) for phase in PHASES},
        **{series(f"{name}_count"): 5 for name in HISTOGRAMS},
        # Five documents of two tokens a step.
        **{series("acceptance_length_bucket", le=bound): num for bound, num in (("1.75", 0), ("2.0", 5), ("+Inf", 5))},
    }
    assert len(done) == 5
    assert expected[series("spec_steps_total")] == expected[series("accepted_tokens_total")] == 10
    samples = scrape_until(run_id, expected, total(done, "num_output_tokens"))
    names = {sample.name for sample in samples if sample.labels.get("run_id") == run_id}
    gauges = {f"ray_specextend_{name}" for name in GAUGES}  # Ray forgets these once a run has ended
    assert {name.removesuffix("_created") for name in names} | gauges == exported_names()


def total(rows: Collection[dict[str, Any]], column: str) -> float:
    return sum(row[column] for row in rows)
