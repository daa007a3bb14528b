"""Write the tables of PAGES from the figures in benchmarks/results/.

    python -m scripts.page_tables

A table stands between `<!-- table: WHAT FILE -->` and `<!-- end of table -->`. WHAT is `all` for the tables of a file,
`first` for the first of them, `ratios` for a digest of `compare`, or `acceptance` for one of `retrieval`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from specextend.bench.result_tables import read_figures, to_markdown

ROOT = Path(__file__).parent.parent
PAGES = ("README.md", "docs/results.md", "docs/drafts.md")
_TABLE = re.compile(r"(<!-- table: (\S+) (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
_DECODE, _WHOLE = "decode_tokens_per_s", "end_to_end_tokens_per_s"
_RATIOS = (
    ("**specextend** over transformers `generate`, decoding", "specextend/transformers", _DECODE),
    ("**specextend** over transformers `generate`, end to end", "specextend/transformers", _WHOLE),
    ("**specextend** over transformers with prompt lookup, decoding", "specextend/transformers-lookup", _DECODE),
    ("**specextend** over llama.cpp, decoding", "specextend/llama.cpp", _DECODE),
    ("**specextend** over llama.cpp, end to end", "specextend/llama.cpp", _WHOLE),
    ("our plain decoding over transformers, decoding", "autoregressive/transformers", _DECODE),
    ("our plain decoding over llama.cpp, decoding", "autoregressive/llama.cpp", _DECODE),
    ("**specextend** over our plain decoding, decoding", "specextend/autoregressive", _DECODE),
    ("**specextend** over our plain decoding, end to end", "specextend/autoregressive", _WHOLE),
)
_VIEW = 512
"""Tokens in view in the digest of `retrieval`."""
_KIND_NAMES = {"govreport": "GovReport", "pg19": "PG-19", "passkey": "passkey", "needles": "needles", "quote": "quotes"}
_DRAFT_NAMES = {
    "smollm2-135m-eagle": "head",
    "smollm2-135m-lm": "small LM",
    "ngram": "n-grams",
    "smollm2-135m-eagle+ngram": "merged",
}


def filled(page: str) -> str:
    """Return the text of a page with all its tables made anew.

    Raises ValueError if a table's file or kind is unknown, OSError if the file is missing.
    """
    return _TABLE.sub(lambda found: f"{found[1]}{_table(found[2], found[3])}\n{found[4]}", page)


def _table(what: str, path: str) -> str:
    if what not in _KINDS:
        raise ValueError(f"a table is one of {', '.join(_KINDS)}, not {what!r}")
    return _KINDS[what](read_figures(str(ROOT / path))).rstrip("\n")


def _first(result: dict[str, Any]) -> str:
    """Return the first table without its title, which is the first paragraph."""
    return to_markdown(result).split("\n\n")[1]


def _ratios(result: dict[str, Any]) -> str:
    """Return the medians of some ratios by length, and that of all documents with its range."""
    groups = result["buckets"]
    lines = [f"| speed, as a ratio | {' | '.join(groups)} | all |", f"|---|{'---|' * len(groups)}---|"]
    for label, pair, speed in _RATIOS:
        medians = [f"{group['ratios'][pair][speed]['median']:.2f}" for group in groups.values()]
        whole = result["all"]["ratios"][pair][speed]
        spread = f"{whole['median']:.2f} ({whole['min']:.2f} to {whole['max']:.2f})"
        lines.append(f"| {' | '.join([label, *medians, spread])} |")
    return "\n".join(lines)


def _acceptance(result: dict[str, Any]) -> str:
    """Return the mean acceptance lengths, a row for each draft and cache, all prompt lengths in one cell."""
    found = {
        (cell["draft"], cell["policy"], cell["kind"], cell["length"]): f"{cell['acceptance_length']['mean']:.1f}"
        for cell in result["cells"]
        if cell["cache_tokens"] in (None, _VIEW)
    }
    lines = [f"| draft | cache | {' | '.join(_KIND_NAMES.values())} |", f"|---|---|{'---|' * len(_KIND_NAMES)}"]
    for draft, policy in dict.fromkeys(key[:2] for key in found):
        cells = [
            " ".join(found.get((draft, policy, kind, length), "-") for length in result["lengths"])
            for kind in _KIND_NAMES
        ]
        lines.append(f"| {' | '.join([_DRAFT_NAMES[draft], policy, *cells])} |")
    return "\n".join(lines)


_KINDS: dict[str, Callable[[dict[str, Any]], str]] = {
    "all": to_markdown,
    "first": _first,
    "ratios": _ratios,
    "acceptance": _acceptance,
}


if __name__ == "__main__":
    for name in PAGES:
        path = ROOT / name
        path.write_text(filled(path.read_text(encoding="utf-8")), encoding="utf-8")
