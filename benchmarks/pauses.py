"""Measure pauses of running documents while prompts are read, by the steps' share of time.

    python -m benchmarks.pauses --batch 4 --shares 0 0.125 0.5

An engine decodes reports of 1K to 8K with each share in turn, in changing order. Each round prints
a line of JSON with figures by share: documents per hour, the longest pause of any document, the
median of longest pauses, and mean seconds per document.
"""

from __future__ import annotations

import argparse
import json
import threading
import time
from collections.abc import Sequence
from statistics import mean, median

from benchmarks.benchmark import Benchmark
from benchmarks.documents import choose_documents
from benchmarks.run import use_configured_threads
from specextend import Request, load_engine
from specextend.decoding.engine import Engine

LOOK_EVERY_S = 0.005


def watch(engine: Engine, ended: threading.Event, longest: dict[str, float]) -> None:
    """Record the longest pause of each document until `ended`."""
    last: dict[str, tuple[int, float]] = {}
    while not ended.wait(LOOK_EVERY_S):
        now = time.perf_counter()
        for name, num_tokens in engine.progress().items():
            before, since = last.get(name, (0, now))
            if num_tokens > before:
                last[name] = num_tokens, now
                longest[name] = max(longest.get(name, 0.0), now - since)


def measure(engine: Engine, requests: Sequence[Request], share: float) -> dict[str, float]:
    """Decode the requests with a share for steps."""
    engine.decode_share, ended, longest = share, threading.Event(), dict[str, float]()
    watcher = threading.Thread(target=watch, args=(engine, ended, longest))
    watcher.start()
    begin = time.perf_counter()
    total_s = [completion.stats.total_s for completion in engine.generate(requests)]
    wall_s = time.perf_counter() - begin
    ended.set()
    watcher.join()
    pauses = {"longest_pause_s": max(longest.values()), "median_pause_s": median(longest.values())}
    figures = {
        "documents_per_h": 3600 * len(total_s) / wall_s,
        **pauses,
        "document_s": mean(total_s),
    }
    return {name: round(value, 3) for name, value in figures.items()}


def main() -> None:
    """Measure and print a line per round."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.125, 0.5])
    parser.add_argument("--per-bucket", type=int, default=4)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    shared = {"decoding.max_batch_size": options.batch, "decoding.cache_gib": 0.25 * options.batch}
    sizes = {"per_bucket": options.per_bucket, "together": options.per_bucket}
    benchmark = Benchmark(
        about="pauses", base="engine", variants={"engine": None}, tables=(), set=shared, **sizes
    )
    config = benchmark.configs()["engine"]
    use_configured_threads(config)
    groups = choose_documents(benchmark, [config])
    prompts = [
        prompt
        for together in zip(*(group.prompts for group in groups), strict=True)
        for prompt in together
    ]
    requests = [
        Request(request_id=str(n), prompt_token_ids=each, max_new_tokens=128)
        for n, each in enumerate(prompts)
    ]
    engine = load_engine(config)
    measure(engine, requests[:2], 0.0)  # first-time costs
    for number in range(options.repeats):
        turn = number % len(options.shares)
        order = options.shares[turn:] + options.shares[:turn]
        found = {share: measure(engine, requests, share) for share in order}
        print(
            json.dumps(
                {"batch": options.batch, **{str(share): found[share] for share in sorted(found)}}
            ),
            flush=True,
        )


if __name__ == "__main__":
    main()
