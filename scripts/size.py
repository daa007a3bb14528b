"""Print the lexical tokens of the package and its tests, by folder: `python -m scripts.size`.

Comments, docstrings and layout do not count, so nothing is gained by packing lines.
"""

from __future__ import annotations

import ast
import io
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("specextend", "jobs")
_LAYOUT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def count_tokens(source: str) -> int:
    """Count the tokens of a module, without comments, layout, and strings that stand alone as
    docstrings do.
    """
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _LAYOUT and token.start not in docstrings for token in tokens)


def tokens_by_folder(*folders: str) -> Counter[str]:
    """Count the tokens of the modules below some folders of the project, by the folder that holds
    them.
    """
    counts: Counter[str] = Counter()
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            counts[path.parent.relative_to(ROOT).as_posix()] += count_tokens(
                path.read_text(encoding="utf-8")
            )
    return counts


def measure() -> dict[str, int]:
    """Return what `tests/size.json` limits."""
    modules = [path for path in (ROOT / "specextend").rglob("*.py") if path.name != "__init__.py"]
    return {
        "modules": len(modules),
        "tokens": tokens_by_folder(*PRODUCT).total(),
        "test_tokens": tokens_by_folder("tests").total(),
    }


if __name__ == "__main__":
    for name, number in sorted((tokens_by_folder(*PRODUCT) + tokens_by_folder("tests")).items()):
        print(f"{number:8,} {name}")
    print(measure())
