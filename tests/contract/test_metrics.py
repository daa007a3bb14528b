"""What Prometheus finds at Ray's port during a run, and what the dashboard asks it."""

import re
import urllib.request
from collections import defaultdict

import pytest
import ray

from tests.job.conftest import ROOT, TEXT, on, read_json, rows, wait_for, write_corpus

SAMPLE = re.compile(r"ray_specextend_(\w+)_total\{(.*)\} (\S+)")


def exported(run_id):
    """The counters of a start by name and kind."""
    [node] = ray.nodes()
    with urllib.request.urlopen(f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics") as answer:
        found = SAMPLE.findall(answer.read().decode())
    counters = defaultdict(dict)
    for name, labels, value in found:
        if f'run_id="{run_id}"' in labels:
            counters[name][re.search(r'kind="(\w+)"', labels)[1]] = float(value)
    return counters


def test_the_counters_of_a_run_are_those_of_its_rows_and_the_dashboard_asks_for_them(summarize_here, tmp_path):
    """A dashboard that stays empty is noticed on the night when it is needed."""
    corpus = write_corpus(tmp_path / "in" / "a.parquet", [TEXT * 3, None, TEXT * 9, TEXT * 30], doc=[*"abcd"])
    failing = ("prompt.max_prompt_tokens=300", "prompt.length_policy=error", "job.max_error_fraction=1")
    summarize_here(*on(corpus, tmp_path / "out", "input.id_column=doc", *failing))
    [start] = read_json(tmp_path / "out" / "report.json")["starts"]
    wait_for(lambda: exported(start["run_id"]).get("seconds"), "metrics")
    counters = exported(start["run_id"])
    done, failed = (rows(tmp_path / "out" / name) for name in ("summaries", "errors"))
    assert {row["error_class"] for row in failed} > {"NullText"}, "one before there was a Ray, and one by a worker"
    assert counters["documents"] == {"done": len(done), "failed": len(failed)}

    def total(column):
        return pytest.approx(sum(row[column] or 0 for row in done))

    assert counters["tokens"] == {kind: total(f"num_{kind}_tokens") for kind in counters["tokens"]}
    assert counters["steps"]["speculative"] == total("num_spec_steps")
    assert counters["seconds"] == {kind: total(f"{kind}_s") for kind in counters["seconds"]}
    known = {(name, kind) for name, kinds in counters.items() for kind in (*kinds, "")}
    known.add(("tokens", "cached"))  # of several tasks or equal beginnings
    panels = read_json(ROOT / "deploy" / "grafana" / "specextend.json")["panels"]
    asked = re.findall(r'ray_specextend_(\w+?)_total\{(?:kind="(\w+)")?', repr([panel["targets"] for panel in panels]))
    assert {*asked} <= known
    assert {name for name, _ in asked} == {*counters}
