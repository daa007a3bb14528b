"""The command line of benchmarks: run a YAML file, or show a result."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.benchmark import Benchmark
from benchmarks.tables import CONDITIONS, check_table, draw, to_markdown
from specextend.terminal import complain

INTERRUPTED = 75


def main(arguments: Sequence[str] | None = None, description: str | None = None) -> int:
    """Run or show a benchmark, and return the exit code."""
    options = _parser(description).parse_args(arguments)
    try:
        result = (
            read_result(Path(options.file)) if options.file.endswith(".json") else _measure(options)
        )
        _show(result, options)
    except (ValueError, OSError) as error:
        complain(error)
        return 2
    except KeyboardInterrupt:
        kept = f"{options.json} holds the rounds so far" if options.json else "nothing was written"
        print(f"interrupted; {kept}", file=sys.stderr)
        return INTERRUPTED
    return 0


def _measure(options: argparse.Namespace) -> dict[str, Any]:
    benchmark = Benchmark.load(options.file, options.set, options.only)
    path = None if options.json is None else Path(options.json)
    if path is not None and (
        path.is_dir() or not path.parent.is_dir() or not os.access(path.parent, os.W_OK)
    ):
        raise ValueError(f"--json {path} cannot be written; name a file in a folder that is there")
    for table in benchmark.tables:
        check_table(table, benchmark.variants)
    from benchmarks.run import run  # imports torch

    return run(benchmark, _say, lambda result: None if path is None else write_result(path, result))


def write_result(path: Path, result: dict[str, Any]) -> None:
    """Write a result atomically, with a row per line."""
    head = {name: value for name, value in result.items() if name != "rows"} | {"rows": []}
    text = json.dumps(head, indent=1, ensure_ascii=False, allow_nan=False).removesuffix("[]\n}")
    rows = ",\n  ".join(
        json.dumps(row, ensure_ascii=False, allow_nan=False) for row in result["rows"]
    )
    temporary = path.with_suffix(".tmp")
    temporary.write_text(f"{text}[\n  {rows}\n ]\n}}\n", encoding="utf-8")
    os.replace(temporary, path)


def read_result(path: Path) -> dict[str, Any]:
    """Read a result. Raises ValueError for other files."""
    try:
        result = json.loads(path.read_text(encoding="utf-8"))
        return {**result, "rows": [*result["rows"]], "benchmark": {**result["benchmark"]}}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is no result of a benchmark ({error!r})") from None


def _show(result: dict[str, Any], options: argparse.Namespace) -> None:
    tables = result["benchmark"]["tables"]
    for name in (*tables, CONDITIONS):
        print(to_markdown(result, name))
    if options.draw:
        Path(options.draw).write_bytes(draw(result, tables[0]))
        print(f"drawing: {options.draw}")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _parser(description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "file", help="a benchmark (.yaml) to measure, or the result of one (.json) to show"
    )
    parser.add_argument(
        "--only",
        type=lambda text: text.split(","),
        metavar="NAMES",
        help="measure these variants only",
    )
    parser.add_argument(
        "--json", metavar="PATH", help="write the result there, after each document"
    )
    parser.add_argument("--draw", metavar="PATH", help="draw the first table there as SVG")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="override a key of the benchmark (repeats=3), or of the configuration for all "
        "variants (cache.recent=64)",
    )
    return parser
