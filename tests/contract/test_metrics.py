"""What Prometheus finds at Ray's port during a run, and what the dashboard asks it."""

import re
import urllib.request
from collections import defaultdict

import ray

from tests.job.conftest import CONFIG, ROOT, TEXT, in_process, on, read_json, rows, wait_for, write_corpus

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


def test_the_counters_of_a_run_are_those_of_its_rows_and_the_dashboard_asks_for_them(kept_kernels, local_ray, tmp_path):
    """A dashboard that stays empty is noticed on the night when it is needed."""
    corpus = write_corpus(tmp_path / "in" / "a.parquet", [TEXT * 3, None, TEXT * 9, TEXT * 30], doc=[*"abcd"])
    failing = ("prompt.max_prompt_tokens=300", "prompt.length_policy=error", "job.max_error_fraction=1")
    in_process("summarize.py", "--config", CONFIG, *on(corpus, tmp_path / "out", "input.id_column=doc", *failing))
    [start] = read_json(tmp_path / "out" / "report.json")["starts"]
    wait_for(lambda: exported(start["run_id"]).get("seconds"), "metrics, which Ray sends every ten seconds")
    counters = exported(start["run_id"])
    done = rows(tmp_path / "out" / "summaries")
    failed = rows(tmp_path / "out" / "errors")
    assert {row["error_class"] for row in failed} > {"NullText"}, "one before there was a Ray, and one by a worker"
    assert counters["documents"] == {"done": len(done), "failed": len(failed)}

    def total(column):
        return sum(row[column] or 0 for row in done)

    for kind, value in counters["tokens"].items():
        assert value == total(f"num_{kind}_tokens"), kind
    assert counters["steps"]["speculative"] == total("num_spec_steps")
    for kind, value in counters["seconds"].items():
        assert abs(value - total(f"{kind}_s")) < 1e-6, kind
    known = {"tokens": {"cached"}} | {name: {*kinds} for name, kinds in counters.items()}
    known["tokens"].add("cached")  # of several tasks or equal beginnings
    panels = read_json(ROOT / "deploy" / "grafana" / "specextend.json")["panels"]
    asked = re.findall(r'ray_(\w+?)_total\{(?:kind="(\w+)")?', repr([panel["targets"] for panel in panels]))
    assert {name for name, _ in asked} == {f"specextend_{name}" for name in known}
    for name, kind in asked:
        assert not kind or kind in known[name.removeprefix("specextend_")], (name, kind)
