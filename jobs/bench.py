"""Measure decoding on the documents of a configuration, and show the figures.

    python jobs/bench.py compare --documents examples/govreport.parquet --json compare.json
    python jobs/bench.py trees --nodes 8,16,24 --depths 4,6 --thresholds 0.05,0.1
    python jobs/bench.py ablation --quick --json ablation.json      # also: sweep, retrieval-time, batch, reasoning
    python jobs/bench.py memory --tokens 8000
    python jobs/bench.py retrieval --drafts eagle:models/smollm2-135m-eagle,ngram --lengths 1024,4096 --json study.json
    python jobs/bench.py kernels --json kernels.json
    python jobs/bench.py plot --json compare.json --output benchmarks/results
    python jobs/bench.py table --json compare.json

Without a section, `compare` runs. Decoding is greedy, one document at a time. Each section has its own options:
`jobs/bench.py SECTION --help` lists them. Those that take `--quick` write each measurement to `--json` at once, and
go on where they stopped if that file is there. Exit code 2: an option, the configuration, the input or a model is
unusable; 75: interrupted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from specextend.bench.ablation import (
    ABLATION,
    ABLATION_QUICK,
    REASONING,
    REASONING_QUICK,
    ablation,
    reasoning,
)
from specextend.bench.batch_sizes import BATCH, BATCH_QUICK, batch
from specextend.bench.compare import compare
from specextend.bench.kernels import KernelOptions, kernels
from specextend.bench.prefill_memory import measure_memory
from specextend.bench.result_tables import read_figures, to_markdown, to_terminal
from specextend.bench.retrieval_study import RetrievalOptions, retrieval
from specextend.bench.retrieval_timing import (
    RETRIEVAL_TIME,
    RETRIEVAL_TIME_QUICK,
    SWEEP,
    SWEEP_QUICK,
    retrieval_time,
    sweep,
)
from specextend.bench.series import SeriesOptions
from specextend.bench.sides import SIDES
from specextend.bench.tree_sizes import TreeGrid, trees
from specextend.bench.workload import BenchOptions
from specextend.config import RunConfig
from specextend.data.storage import check_writable, is_folder, resolve, write_bytes
from specextend.terminal import complain, guard_streams

RESULTS = "benchmarks/results"
REPORTS = "examples/govreport.parquet"
INTERRUPTED = 75
MeasureSeries = Callable[[RunConfig, SeriesOptions, str | None, Callable[[str], None]], dict[str, Any]]
SERIES: dict[str, tuple[MeasureSeries, SeriesOptions, SeriesOptions, str]] = {
    "ablation": (ablation, ABLATION, ABLATION_QUICK, "add the parts of SpecExtend one by one"),
    "sweep": (sweep, SWEEP, SWEEP_QUICK, "vary chunk size, top-k, cache size and refresh interval of retrieval"),
    "retrieval-time": (
        retrieval_time,
        RETRIEVAL_TIME,
        RETRIEVAL_TIME_QUICK,
        "measure the time of retrieval by prompt length",
    ),
    "batch": (batch, BATCH, BATCH_QUICK, "measure documents an hour by batch size"),
    "reasoning": (reasoning, REASONING, REASONING_QUICK, "compare short prompts and long outputs with the opposite"),
}
"""Sections whose measurements can be resumed, with their documents in full and with `--quick`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one section, and return the exit code."""
    given = [*(sys.argv[1:] if arguments is None else arguments)]
    names_no_section = not given or (given[0].startswith("-") and given[0] not in ("-h", "--help"))
    options = _parser().parse_args(["compare", *given] if names_no_section else given)
    try:
        options.run(options)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        print(f"interrupted; {_what_is_kept(options)}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _what_is_kept(options: argparse.Namespace) -> str:
    if getattr(options, "section", None) in SERIES and options.json:
        return f"the same command goes on with what {options.json} holds"
    return "nothing was written"


def _compare(options: argparse.Namespace) -> None:
    _finish(options, compare(_config(options), _bench_options(options), _say, options.sides))


def _trees(options: argparse.Namespace) -> None:
    grid = TreeGrid(nodes=options.nodes, depths=options.depths, thresholds=options.thresholds)
    _finish(options, trees(_config(options), _bench_options(options), grid, _say))


def _memory(options: argparse.Namespace) -> None:
    _finish(options, measure_memory(_config(options), _bench_options(options), options.tokens, _say))


def _retrieval(options: argparse.Namespace) -> None:
    names = ("kinds", "lengths", "per_length", "drafts", "policies", "cache_tokens", "study", "max_new_tokens", "seed")
    values = {name: getattr(options, name) for name in (*names, "examples")}
    _finish(options, retrieval(_config(options), RetrievalOptions(**values), _say))


def _kernels(options: argparse.Namespace) -> None:
    names = ("keys", "chunk_keys", "rounds", "num_documents", "tokens", "max_new_tokens")
    values = {name: getattr(options, name) for name in names}
    _finish(options, kernels(_config(options), KernelOptions(**values), _say))


def _series(options: argparse.Namespace) -> None:
    measure, full, quick, _ = SERIES[options.section]
    names = ("buckets", "per_bucket", "max_new_tokens", "repeats")
    given = {name: value for name in names if (value := getattr(options, name)) is not None}
    result = measure(_config(options), replace(quick if options.quick else full, **given), options.json, _say)
    _show_tables(options, result)


def _plot(options: argparse.Namespace) -> None:
    try:
        from specextend.bench.plot import plot
    except ModuleNotFoundError as error:
        raise ValueError(f"plot needs {error.name}: pip install 'specextend[bench]'") from None
    results = {path: read_figures(path) for path in options.json}
    drawings = {Path(path).stem: _show(plot, path, result) for path, result in results.items()}
    if len(drawings) < len(results):
        raise ValueError("two of the files have the same name, so their drawings would too; rename one")
    for name, svg in drawings.items():
        path = f"{options.output}/{name}.svg"
        write_bytes(resolve(path), svg)
        print(f"drawing: {path}")


def _table(options: argparse.Namespace) -> None:
    results = {path: read_figures(path) for path in options.json}
    print("\n".join(_show(to_markdown, path, result) for path, result in results.items()), end="")


def _config(options: argparse.Namespace) -> RunConfig:
    """Load the configuration; of several places that name documents, --documents comes first, then --set.

    Raises ValueError if it cannot be used, or the figures could not be written later.
    """
    _check_json(options.json)
    default, given = (getattr(options, name, None) for name in ("default_documents", "documents"))
    before, after = ([f"input.path={json.dumps(path)}"] if path else [] for path in (default, given))
    return RunConfig.load(options.config, [*before, *options.set, *after])


def _check_json(path: str | None) -> None:
    """Raise ValueError if a file cannot be written."""
    if path is None:
        return
    place = resolve(path)
    if is_folder(place):
        raise ValueError(f"--json {path} is a folder; name a file")
    try:
        check_writable(place.parent)
    except ValueError as error:
        raise ValueError(f"--json {path}: {error}") from None


def _bench_options(options: argparse.Namespace) -> BenchOptions:
    names = ("buckets", "per_bucket", "max_new_tokens")
    return BenchOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def _finish(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the figures, then print them as tables."""
    if options.json:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_bytes(resolve(options.json), text.encode(errors="backslashreplace"))
    _show_tables(options, result)


def _show_tables(options: argparse.Namespace, result: dict[str, Any]) -> None:
    print(to_terminal(result), end="")
    if options.json:
        print(f"figures: {options.json}")


def _show(show: Callable[[dict[str, Any]], Any], path: str, result: dict[str, Any]) -> Any:
    """Show the figures of one file. Raises ValueError, which names the file, if `show` cannot."""
    try:
        return show(result)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    except KeyError as error:
        raise ValueError(f"{path} lacks {error}: another version wrote it, so measure again") from None
    except (TypeError, AttributeError) as error:
        raise ValueError(f"{path} does not hold the figures of its section ({error}); measure again") from None


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    sections = parser.add_subparsers(title="sections", metavar="SECTION", required=True)

    def add(name: str, run: Callable[[argparse.Namespace], None], about: str) -> argparse.ArgumentParser:
        section = sections.add_parser(name, help=about, description=about, allow_abbrev=False)
        section.set_defaults(run=run)
        return section

    _add_compare(add("compare", _compare, "decode with every mode, every draft and transformers' generate"))
    _add_trees(add("trees", _trees, "compare tree sizes with plain decoding"))
    _add_memory(add("memory", _memory, "measure the peak memory of a prefill"))
    _add_retrieval(
        add("retrieval", _retrieval, "replay drafts and cache policies on recorded documents; nothing is timed")
    )
    _add_kernels(add("kernels", _kernels, "measure every attention kernel of a CPU: times, errors, acceptance"))
    for name, (_, full, quick, about) in SERIES.items():
        _add_series(add(name, _series, about), name, full, quick)
    plot = add("plot", _plot, "draw figures of compare, retrieval and all series as SVG; measures nothing")
    plot.add_argument("--output", metavar="FOLDER", default=RESULTS, help="folder of the drawings")
    for section in (plot, add("table", _table, "print figures as Markdown tables; measures nothing")):
        section.add_argument("--json", nargs="+", required=True, metavar="PATH", help="files of figures to read")
    return parser


def _add_compare(section: argparse.ArgumentParser) -> None:
    _add_configuration(section)
    _add_documents(section)
    _add_max_new_tokens(section, BenchOptions().max_new_tokens)
    section.add_argument(
        "--sides", type=_sides, help=f"any of {','.join(SIDES)}; default: all that the configuration can run"
    )


def _add_trees(section: argparse.ArgumentParser) -> None:
    grid = TreeGrid()
    _add_configuration(section)
    _add_documents(section)
    _add_max_new_tokens(section, BenchOptions().max_new_tokens)
    _add(section, "--nodes", _numbers(int), grid.nodes, "values of tree.nodes")
    _add(section, "--depths", _numbers(int), grid.depths, "values of tree.depth")
    _add(section, "--thresholds", _numbers(float), grid.thresholds, "values of tree.threshold")


def _add_memory(section: argparse.ArgumentParser) -> None:
    _add_configuration(section)
    _add_documents(section)
    _add(section, "--tokens", int, 8000, "length of the prompt in tokens")


def _add_retrieval(section: argparse.ArgumentParser) -> None:
    default = RetrievalOptions()
    _add_configuration(section)
    _add_max_new_tokens(section, default.max_new_tokens)
    _add(section, "--kinds", _names, default.kinds, "kinds of documents")
    _add(section, "--lengths", _numbers(int), default.lengths, "most tokens of the prompts")
    _add(section, "--per-length", int, default.per_length, "documents of each kind and length")
    section.add_argument(
        "--drafts",
        type=_names,
        default=default.drafts,
        help="ngram, eagle:FOLDER, model:NAME, eagle:FOLDER+ngram; default: the configured draft, n-grams, and both",
    )
    _add(section, "--policies", _names, default.policies, "cache policies")
    _add(section, "--cache-tokens", _numbers(int), default.cache_tokens, "numbers of visible tokens")
    section.add_argument(
        "--study",
        metavar="DRAFT",
        help="draft with which retrieval's choices are studied, or none; default: the first draft",
    )
    _add(section, "--seed", int, default.seed, "seed of the probes")
    _add(section, "--examples", str, default.examples, "folder of govreport.parquet and pg19.parquet")


def _add_kernels(section: argparse.ArgumentParser) -> None:
    default = KernelOptions()
    _add_configuration(section)
    _add_max_new_tokens(section, default.max_new_tokens)
    _add_reports(section)
    _add(section, "--num-documents", int, default.num_documents, "documents of that file")
    _add(section, "--tokens", int, default.tokens, "tokens of their prompts, which are cut")
    _add(section, "--keys", _numbers(int), default.keys, "keys of decoding steps")
    _add(section, "--chunk-keys", _numbers(int), default.chunk_keys, "keys of prompt chunks")
    _add(section, "--rounds", int, default.rounds, "rounds in which the kernels take turns")


def _add_series(section: argparse.ArgumentParser, name: str, full: SeriesOptions, quick: SeriesOptions) -> None:
    def add(option: str, kind: Callable[[str], Any], about: str) -> None:
        default, small = (getattr(each, option.removeprefix("--").replace("-", "_")) for each in (full, quick))
        about += f"; default: {_listed(default)}, with --quick {_listed(small)}"
        section.add_argument(option, type=kind, help=about)

    section.set_defaults(section=name)
    _add_configuration(section)
    _add_reports(section)
    section.add_argument("--quick", action="store_true", help="measure less: minutes on two cores")
    add("--buckets", _numbers(int), "upper bounds of the prompt in tokens")
    add("--per-bucket", int, "documents of each bucket")
    add("--max-new-tokens", int, "most tokens to decode for a document")
    add("--repeats", int, "measurements of each document")


def _add(section: argparse.ArgumentParser, option: str, kind: Callable[[str], Any], default: Any, about: str) -> None:
    """Add an option whose help ends in its default."""
    section.add_argument(option, type=kind, default=default, help=f"{about}; default: {_listed(default)}")


def _listed(value: Any) -> str:
    """Write a value as on the command line."""
    return ",".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _add_configuration(section: argparse.ArgumentParser) -> None:
    _add(section, "--config", str, "configs/smollm2.yaml", "configuration of the pair")
    section.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a value of the configuration"
    )
    section.add_argument("--json", metavar="PATH", help="write the figures to this file")


def _add_reports(section: argparse.ArgumentParser) -> None:
    """Let a section measure on the example reports unless others are named."""
    section.set_defaults(default_documents=REPORTS)
    section.add_argument(
        "--documents",
        "--input",
        metavar="PATH",
        help=f"Parquet file to read instead of the configuration's input.path; default: {REPORTS}",
    )


def _add_documents(section: argparse.ArgumentParser) -> None:
    default = BenchOptions()
    section.add_argument("--documents", "--input", metavar="PATH", help="Parquet file to read instead of input.path")
    _add(section, "--buckets", _numbers(int), default.buckets, "upper bounds of the prompt in tokens")
    _add(section, "--per-bucket", int, default.per_bucket, "documents of each bucket")


def _add_max_new_tokens(section: argparse.ArgumentParser, default: int) -> None:
    _add(section, "--max-new-tokens", int, default, "most tokens to decode for a document")


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


def _numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple[Any, ...]]:
    def parse(text: str) -> tuple[Any, ...]:
        try:
            return tuple(kind(item) for item in text.split(","))
        except ValueError:
            raise argparse.ArgumentTypeError(f"expected numbers separated by commas, got {text!r}") from None

    return parse


def _sides(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    unknown = [name for name in names if name not in SIDES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(SIDES)}")
    return names


if __name__ == "__main__":
    guard_streams()
    sys.exit(main())
