"""Measure decoding on the documents of a configuration, and show the figures.

    python jobs/bench.py compare --documents examples/govreport.parquet --json compare.json
    python jobs/bench.py sweep --nodes 8,16,24 --depths 4,6 --thresholds 0.05,0.1
    python jobs/bench.py memory --tokens 8000
    python jobs/bench.py retrieval --drafts eagle:models/smollm2-135m-eagle,ngram --lengths 1024,4096 --json study.json
    python jobs/bench.py kernels --json kernels.json
    python jobs/bench.py plot --json compare.json --output benchmarks/results
    python jobs/bench.py table --json compare.json

Without a section, `compare` runs. Decoding is greedy, one document at a time. Each section has its own options:
`jobs/bench.py SECTION --help` lists them. Exit code 2: an option, the configuration, the input or a model is unusable.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from specextend.bench.compare import compare
from specextend.bench.kernels import KernelOptions, kernels
from specextend.bench.prefill_memory import measure_memory
from specextend.bench.result_tables import read_figures, to_markdown, to_terminal
from specextend.bench.retrieval_study import RetrievalOptions, retrieval
from specextend.bench.sides import SIDES
from specextend.bench.sweep import TreeGrid, sweep
from specextend.bench.workload import BenchOptions
from specextend.config import RunConfig
from specextend.data.storage import resolve, write_bytes
from specextend.terminal import complain, guard_streams

RESULTS = "benchmarks/results"


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
    return 0


def _compare(options: argparse.Namespace) -> None:
    _finish(options, compare(_config(options), _bench_options(options), _say, options.sides))


def _sweep(options: argparse.Namespace) -> None:
    grid = TreeGrid(nodes=options.nodes, depths=options.depths, thresholds=options.thresholds)
    _finish(options, sweep(_config(options), _bench_options(options), grid, _say))


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
    documents = getattr(options, "documents", None)
    overrides = [f"input.path={json.dumps(documents)}"] if documents else []
    return RunConfig.load(options.config, [*options.set, *overrides])


def _bench_options(options: argparse.Namespace) -> BenchOptions:
    names = ("buckets", "per_bucket", "max_new_tokens")
    return BenchOptions(**{name: getattr(options, name) for name in names if hasattr(options, name)})


def _finish(options: argparse.Namespace, result: dict[str, Any]) -> None:
    """Write the figures, then print them as tables."""
    if options.json:
        text = json.dumps(result, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
        write_bytes(resolve(options.json), text.encode(errors="backslashreplace"))
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
    _add_sweep(add("sweep", _sweep, "compare tree sizes with plain decoding"))
    _add_memory(add("memory", _memory, "measure the peak memory of a prefill"))
    _add_retrieval(
        add("retrieval", _retrieval, "replay drafts and cache policies on recorded documents; nothing is timed")
    )
    _add_kernels(add("kernels", _kernels, "measure every attention kernel of a CPU: times, errors, acceptance"))
    plot = add("plot", _plot, "draw figures of compare and retrieval as SVG; measures nothing")
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


def _add_sweep(section: argparse.ArgumentParser) -> None:
    grid = TreeGrid()
    _add_configuration(section, f"{RESULTS}/tree-sweep.json")
    _add_documents(section)
    _add_max_new_tokens(section, BenchOptions().max_new_tokens)
    section.add_argument("--nodes", type=_numbers(int), default=grid.nodes, help="values of tree.nodes")
    section.add_argument("--depths", type=_numbers(int), default=grid.depths, help="values of tree.depth")
    section.add_argument("--thresholds", type=_numbers(float), default=grid.thresholds, help="values of tree.threshold")


def _add_memory(section: argparse.ArgumentParser) -> None:
    _add_configuration(section)
    _add_documents(section)
    section.add_argument("--tokens", type=int, default=8000, help="length of the prompt in tokens")


def _add_retrieval(section: argparse.ArgumentParser) -> None:
    default = RetrievalOptions()
    _add_configuration(section)
    _add_max_new_tokens(section, default.max_new_tokens)
    section.add_argument("--kinds", type=_names, default=default.kinds, help=f"any of {','.join(default.kinds)}")
    section.add_argument("--lengths", type=_numbers(int), default=default.lengths, help="most tokens of the prompts")
    section.add_argument("--per-length", type=int, default=default.per_length, help="documents of each kind and length")
    section.add_argument(
        "--drafts",
        type=_names,
        default=default.drafts,
        help="ngram, eagle:FOLDER, model:NAME, eagle:FOLDER+ngram; default: the configured draft, n-grams, and both",
    )
    section.add_argument(
        "--policies", type=_names, default=default.policies, help=f"any of {','.join(default.policies)}"
    )
    section.add_argument(
        "--cache-tokens", type=_numbers(int), default=default.cache_tokens, help="numbers of visible tokens"
    )
    section.add_argument("--study", metavar="DRAFT", help="draft with which retrieval's choices are studied, or none")
    section.add_argument("--seed", type=int, default=default.seed, help="seed of the probes")
    section.add_argument(
        "--examples", metavar="FOLDER", default=default.examples, help="folder of govreport.parquet and pg19.parquet"
    )


def _add_kernels(section: argparse.ArgumentParser) -> None:
    default = KernelOptions()
    _add_configuration(section)
    _add_max_new_tokens(section, default.max_new_tokens)
    section.add_argument(
        "--documents",
        metavar="PATH",
        default="examples/govreport.parquet",
        help="Parquet file to read instead of input.path; default: examples/govreport.parquet",
    )
    section.add_argument("--num-documents", type=int, default=default.num_documents, help="documents of that file")
    section.add_argument("--tokens", type=int, default=default.tokens, help="tokens of their prompts, which are cut")
    section.add_argument("--keys", type=_numbers(int), default=default.keys, help="keys of decoding steps")
    section.add_argument("--chunk-keys", type=_numbers(int), default=default.chunk_keys, help="keys of prompt chunks")
    section.add_argument("--rounds", type=int, default=default.rounds, help="rounds in which the kernels take turns")


def _add_configuration(section: argparse.ArgumentParser, json_path: str | None = None) -> None:
    section.add_argument("--config", default="configs/smollm2.yaml", help="configuration of the pair")
    section.add_argument(
        "--set", action="append", default=[], metavar="KEY.PATH=VALUE", help="override a value of the configuration"
    )
    default = f"; default: {json_path}" if json_path else ""
    section.add_argument("--json", metavar="PATH", default=json_path, help=f"write the figures to this file{default}")


def _add_documents(section: argparse.ArgumentParser) -> None:
    default = BenchOptions()
    section.add_argument("--documents", "--input", metavar="PATH", help="Parquet file to read instead of input.path")
    section.add_argument(
        "--buckets", type=_numbers(int), default=default.buckets, help="upper bounds of the prompt in tokens"
    )
    section.add_argument("--per-bucket", type=int, default=default.per_bucket, help="documents of each bucket")


def _add_max_new_tokens(section: argparse.ArgumentParser, default: int) -> None:
    section.add_argument("--max-new-tokens", type=int, default=default, help="most tokens to decode for a document")


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
