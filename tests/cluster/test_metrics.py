"""What a run exports, and what the dashboard asks for."""

import json
import re
import time
import urllib.request
from collections import Counter

import pytest
import ray
from prometheus_client.parser import text_string_to_metric_families

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS
from specextend.cluster.metrics import COUNTED, COUNTERS, GAUGES, HISTOGRAMS
from specextend.stats import PHASES
from tests.cluster.conftest import ROOT
from tests.cluster.fakes import SpeculatingEngine

DASHBOARD = ROOT / "deploy" / "grafana" / "specextend.json"
GOOD = [f"text number {number}" for number in range(4)]
LONGEST_S = 600


def exported_names():
    """The series that a scrape of Ray can find, as Prometheus writes them."""
    names = {f"ray_specextend_{name}_total" for name in COUNTERS} | {f"ray_specextend_{name}" for name in GAUGES}
    return names | {f"ray_specextend_{name}_{part}" for name in HISTOGRAMS for part in ("bucket", "sum", "count")}


def queries():
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


def scrape(run_id):
    """A run's series, as Prometheus would read them from the node's metrics port: `documents_total done`."""
    own = ray.get_runtime_context().get_node_id()
    [port] = [node["MetricsExportPort"] for node in ray.nodes() if node["NodeID"] == own]
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        families = text_string_to_metric_families(answer.read().decode())
    shown = Counter[str]()
    for sample in (sample for family in families for sample in family.samples):
        if sample.name.startswith("ray_specextend_") and sample.labels.get("run_id") == run_id:
            labels = [
                sample.labels[name] for name in ("outcome", "error_class", "cause", "phase") if name in sample.labels
            ]
            shown[" ".join([sample.name, *labels])] += sample.value
    return shown


@pytest.mark.slow
def test_ray_exports_every_metric_with_its_true_value(job, tmp_path):
    """The dashboard's source: a real run with an error row and a lost worker, read from a real metrics port."""
    run = job([*GOOD, "raise", f"kill:{tmp_path}/killed"], workers=2)
    assert run.run(SpeculatingEngine) == EXIT_TOO_MANY_ERRORS
    done = run.summaries().values()
    assert len(done) == 5
    expected = {"documents_total done": 5, "documents_total failed": 1, "errors_total ValueError": 1}
    expected |= {"worker_deaths_total died": 1} | {f"{name}_count": 5 for name in HISTOGRAMS}
    expected |= {f"{name}_total": sum(row[f"num_{name}"] for row in done) for name in COUNTED}
    expected |= {f"busy_seconds_total {phase.removesuffix('_s')}": sum(row[phase] for row in done) for phase in PHASES}
    wanted = {f"ray_specextend_{name}": value for name, value in expected.items()}
    give_up_at = time.monotonic() + LONGEST_S
    num_output_tokens = sum(row["num_output_tokens"] for row in done)
    while True:
        shown = scrape(run.screen.run_id)
        has_all = shown["ray_specextend_output_tokens_total"] >= num_output_tokens  # with those of lost attempts
        if has_all and {name: shown[name] for name in wanted} == pytest.approx(wanted):
            break
        assert time.monotonic() < give_up_at, f"wanted {wanted}, Ray shows {shown}"
        time.sleep(0.5)  # Ray passes metrics on every ten seconds, perhaps between two counters
    gauges = {f"ray_specextend_{name}" for name in GAUGES}  # Ray forgets these once a run has ended
    assert {name.split()[0].removesuffix("_created") for name in shown} | gauges == exported_names()
