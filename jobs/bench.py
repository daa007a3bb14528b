"""Measure on the documents of a configuration, and print tables.

    python jobs/bench.py --config configs/smollm2.yaml --documents examples/govreport.parquet --json compare.json
    python jobs/bench.py sweep --nodes 8,16,24 --depths 4,6 --thresholds 0.05,0.1
    python jobs/bench.py memory --tokens 8000
    python jobs/bench.py retrieval --drafts eagle:models/smollm2-135m-eagle,ngram --lengths 1024,4096 --json study.json
    python jobs/bench.py plot --json compare.json --output benchmarks/results
    python jobs/bench.py table --json compare.json

compare: our modes, our drafts and transformers' generate, document by document. sweep: tree sizes against plain
decoding. memory: what a prefill takes beside weights and cache. retrieval: what a draft's view of the document is
worth, on reports, books and probes with something to repeat; acceptance is replayed, nothing is timed. Decoding is
greedy, one document at a time. plot and table: written figures as SVG and as Markdown; they measure nothing.
Exit code 2 for a configuration, input or model that cannot be.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specextend.bench.compare import BenchOptions, compare
from specextend.bench.markdown import to_markdown
from specextend.bench.memory import measure_memory
from specextend.bench.render import render_compare, render_memory, render_retrieval, render_sweep
from specextend.bench.retrieval import RetrievalOptions, retrieval
from specextend.bench.saved import read_figures
from specextend.bench.sides import SIDES
from specextend.bench.sweep import Grid, sweep
from specextend.config import RunConfig
from specextend.data.storage import resolve, write_bytes

RESULTS = "benchmarks/results"
SWEEP_JSON = f"{RESULTS}/tree-sweep.json"
SHOWN = ("plot", "table")
"""Sections that read figures instead of measuring."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; returns the exit code."""
    options = _parser().parse_args(arguments)
    try:
        if options.section in SHOWN:
            _show(options)
        else:
            _measure_and_write(options)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def _measure_and_write(options: argparse.Namespace) -> None:
    """Raises ValueError and OSError."""
    if len(options.json) > 1:
        raise ValueError(f"--json takes one path here, got {len(options.json)}")
    result, table = _measure(options)
    path = options.json[0] if options.json else SWEEP_JSON if options.section == "sweep" else None
    if path:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_bytes(resolve(path), text.encode())
    print(table, end="")
    if path:
        print(f"figures: {path}")


def _show(options: argparse.Namespace) -> None:
    """Draw or print what was measured. Raises ValueError and OSError."""
    if not options.json:
        raise ValueError(f"{options.section} needs --json with the figures to show")
    results = {path: read_figures(path) for path in options.json}
    if options.section == "table":
        print("\n".join(_shown(to_markdown, path, result) for path, result in results.items()), end="")
        return
    drawings = {Path(path).stem: _shown(_drawer(), path, result) for path, result in results.items()}
    if len(drawings) < len(results):
        raise ValueError("two of the files have the same name, so their drawings would too")
    for name, svg in drawings.items():
        path = f"{options.output}/{name}.svg"
        write_bytes(resolve(path), svg)
        print(f"drawing: {path}")


def _shown(show: Callable[[dict[str, Any]], Any], path: str, result: dict[str, Any]) -> Any:
    """Raises ValueError, which names the file, for figures that `show` cannot show."""
    try:
        return show(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}: this version writes other figures, so measure again") from None


def _drawer() -> Callable[[dict[str, Any]], bytes]:
    """Raises ValueError where matplotlib is not installed."""
    try:
        from specextend.bench.plot import plot
    except ModuleNotFoundError as error:
        raise ValueError(f"plot needs {error.name}, of the extra `bench`: pip install 'specextend[bench]'") from None
    return plot


def _measure(options: argparse.Namespace) -> tuple[dict[str, Any], str]:
    overrides = [*options.set, *([f"input.path={json.dumps(options.documents)}"] if options.documents else [])]
    config = RunConfig.load(options.config, overrides)
    if options.section == "retrieval":
        result = retrieval(config, _retrieval_options(options), _say)
        return result, render_retrieval(result)
    bench = BenchOptions(buckets=options.buckets, per_bucket=options.per_bucket, max_new_tokens=options.max_new_tokens)
    if options.section == "sweep":
        grid = Grid(nodes=options.nodes, depths=options.depths, thresholds=options.thresholds)
        result = sweep(config, bench, grid, _say)
        return result, render_sweep(result)
    if options.section == "memory":
        result = measure_memory(config, bench, options.tokens, _say)
        return result, render_memory(result)
    result = compare(config, bench, _say, options.sides)
    return result, render_compare(result)


def _retrieval_options(options: argparse.Namespace) -> RetrievalOptions:
    """Raises ValueError."""
    names = ("kinds", "lengths", "per_length", "drafts", "policies", "cache_tokens", "study", "seed", "examples")
    values = {name: getattr(options, name) for name in names}
    return RetrievalOptions(max_new_tokens=options.max_new_tokens, **values)


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = BenchOptions()
    parser.add_argument(
        "section", nargs="?", choices=("compare", "sweep", "memory", "retrieval", *SHOWN), default="compare"
    )
    parser.add_argument("--config", default="configs/smollm2.yaml")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="lay over the configuration"
    )
    parser.add_argument("--documents", "--input", metavar="PATH", help="Parquet, in place of input.path")
    parser.add_argument("--buckets", type=_numbers(int), default=default.buckets, help="prompt tokens, upper bounds")
    parser.add_argument("--per-bucket", type=int, default=default.per_bucket, help="documents of each bucket")
    parser.add_argument("--max-new-tokens", type=int, default=default.max_new_tokens)
    parser.add_argument(
        "--json",
        nargs="+",
        default=[],
        metavar="PATH",
        help=f"write the figures there (sweep: {SWEEP_JSON}); plot, table: read them there",
    )
    parser.add_argument(
        "--sides", type=_sides, help=f"compare: of {','.join(SIDES)}; default: all that the configuration can run"
    )
    parser.add_argument("--output", metavar="FOLDER", default=RESULTS, help="plot: of the drawings")
    grid = Grid()
    parser.add_argument("--nodes", type=_numbers(int), default=grid.nodes, help="sweep: tree.nodes")
    parser.add_argument("--depths", type=_numbers(int), default=grid.depths, help="sweep: tree.depth")
    parser.add_argument("--thresholds", type=_numbers(float), default=grid.thresholds, help="sweep: tree.threshold")
    parser.add_argument("--tokens", type=int, default=8000, help="memory: prompt tokens")
    _add_retrieval(parser.add_argument_group("retrieval"))
    return parser


def _add_retrieval(group: argparse._ArgumentGroup) -> None:
    default = RetrievalOptions()
    group.add_argument("--kinds", type=_names, default=default.kinds, help=f"of {','.join(default.kinds)}")
    group.add_argument("--lengths", type=_numbers(int), default=default.lengths, help="prompt tokens, at most")
    group.add_argument("--per-length", type=int, default=default.per_length, help="documents of each kind and length")
    group.add_argument(
        "--drafts",
        type=_names,
        default=default.drafts,
        help="ngram, eagle:FOLDER, model:NAME, eagle:FOLDER+ngram; default: the configuration's, copies, and both",
    )
    group.add_argument("--policies", type=_names, default=default.policies, help=f"of {','.join(default.policies)}")
    group.add_argument("--cache-tokens", type=_numbers(int), default=default.cache_tokens, help="visible tokens")
    group.add_argument("--study", metavar="DRAFT", help="draft to study retrieval's choices with; none: no study")
    group.add_argument("--seed", type=int, default=default.seed, help="of the probes")
    group.add_argument("--examples", metavar="FOLDER", default=default.examples, help="of the corpora")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(item) for item in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"numbers with commas between, got {text!r}") from None

    return parse


def _sides(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SIDES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SIDES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
