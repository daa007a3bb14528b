"""Metrics that a run exports through `ray.util.metrics`. Only the driver records, so a worker's death loses nothing.

Ray adds the prefix `ray_` and keeps the counts of runs that have ended, so every metric has the tag `run_id`. Gauges
disappear once they are not set any more. The sum of a histogram is not exact: Ray rebuilds it from the buckets.
"""

from ray.util.metrics import Counter, Gauge, Histogram

from specextend.cluster.messages import Done
from specextend.cluster.progress import Snapshot
from specextend.stats import PHASES

COUNTERS = {
    "documents": ("Documents that ended, by outcome: done or failed.", ("outcome",)),
    "errors": ("Documents that became error rows, by class.", ("error_class",)),
    "worker_deaths": ("Workers that were lost, by cause: died, node or stalled.", ("cause",)),
    "prompt_tokens": ("Prompt tokens of documents done.", ()),
    "output_tokens": ("Tokens decoded, as workers report them, those of lost attempts included.", ("worker",)),
    "spec_steps": ("Speculative steps of documents done.", ()),
    "plain_steps": ("Plain steps of documents done.", ()),
    "draft_tokens": ("Draft tokens verified, of documents done.", ()),
    "accepted_tokens": ("Draft tokens accepted, of documents done.", ()),
    "busy_seconds": ("Seconds of workers spent on documents done, by phase.", ("phase",)),
}
GAUGES = {
    "rows_left": "Rows neither done nor failed.",
    "documents_running": "Documents in an engine.",
    "workers": "Workers that take documents.",
    "work_fraction": "Share of the run's work that is done, by tokens.",
    "eta_seconds": "Seconds left at the rate of the last ten minutes.",
}
HISTOGRAMS = {
    "document_seconds": (
        "Prefill start to last token of a document.",
        (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000),
    ),
    "step_seconds": (
        "A decoding step, waits for neighbours included: the mean over a document.",
        (0.005, 0.01, 0.02, 0.03, 0.05, 0.07, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2),
    ),
    "acceptance_length": (
        "Tokens a speculative step, the target's own counted: the mean over a document.",
        (1, 1.25, 1.5, 1.75, 2, 2.5, 3, 3.5, 4, 5, 6, 8),
    ),
}
COUNTED = ("prompt_tokens", "spec_steps", "plain_steps", "draft_tokens", "accepted_tokens")


class Metrics:
    """The metrics of one start. Needs a Ray that has been started."""

    def __init__(self, run_id: str):
        self._counters = {
            name: Counter(f"specextend_{name}", description=text, tag_keys=("run_id", *tags))
            for name, (text, tags) in COUNTERS.items()
        }
        self._gauges = {
            name: Gauge(f"specextend_{name}", description=text, tag_keys=("run_id",)) for name, text in GAUGES.items()
        }
        self._histograms = {
            name: Histogram(f"specextend_{name}", description=text, boundaries=list(bounds), tag_keys=("run_id",))
            for name, (text, bounds) in HISTOGRAMS.items()
        }
        for metric in (*self._counters.values(), *self._gauges.values(), *self._histograms.values()):
            metric.set_default_tags({"run_id": run_id})

    def running(self, worker: str, num_new_tokens: int) -> None:
        """Record output tokens of documents that a worker decodes."""
        self._count("output_tokens", num_new_tokens, worker=worker)

    def done(self, worker: str, done: Done, num_new_tokens: int) -> None:
        """Record a document that is done, with its output tokens that `running` was not told of."""
        stats = done.stats
        self._count("documents", 1, outcome="done")
        self._count("output_tokens", num_new_tokens, worker=worker)
        for name in COUNTED:
            self._count(name, getattr(stats, f"num_{name}"))
        for phase in PHASES:
            self._count("busy_seconds", getattr(stats, phase), phase=phase.removesuffix("_s"))
        self._histograms["document_seconds"].observe(stats.total_s)
        if num_steps := stats.num_spec_steps + stats.num_plain_steps:
            self._histograms["step_seconds"].observe(stats.decode_s / num_steps)
        if stats.mean_acceptance_length is not None:
            self._histograms["acceptance_length"].observe(stats.mean_acceptance_length)

    def failed(self, error_class: str, num_documents: int = 1) -> None:
        """Record documents that have become error rows."""
        self._count("documents", num_documents, outcome="failed")
        self._count("errors", num_documents, error_class=error_class)

    def worker_lost(self, cause: str) -> None:
        """Record a worker that was lost. cause: `died`, `node` or `stalled`."""
        self._count("worker_deaths", 1, cause=cause)

    def show(self, snapshot: Snapshot) -> None:
        """Set the gauges."""
        self._gauges["rows_left"].set(snapshot.num_rows - snapshot.num_done - snapshot.num_errors)
        self._gauges["documents_running"].set(snapshot.num_running)
        self._gauges["workers"].set(snapshot.num_workers)
        self._gauges["work_fraction"].set(snapshot.fraction)
        if snapshot.eta_s is not None:
            self._gauges["eta_seconds"].set(snapshot.eta_s)

    def _count(self, name: str, amount: float, **tags: str) -> None:
        """Add to a counter, unless the amount is 0, which Ray refuses."""
        if amount > 0:
            self._counters[name].inc(amount, tags)
