"""Print the lexical tokens of the package and its tests by folder: `python -m scripts.size`.

Comments, docstrings and layout do not count.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
PRODUCT = ("specextend", "jobs")
SATELLITES = {
    "documents": ("specextend/documents/", "specextend/cli/prepare.py"),
    "training": ("specextend/training/",),
    "compiled": ("specextend/attention/compiled/",),
}
"""Parts with a separate limit; the rest of the package is the core."""
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
    """Count the tokens of a module, without comments, layout and docstrings."""
    docstrings = {
        (node.lineno, node.col_offset)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    }
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return sum(token.type not in _LAYOUT and token.start not in docstrings for token in tokens)


def count_words(source: str) -> int:
    """Count the words of the docstrings and comments of a module."""
    prose = [
        node.value.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    ]
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    prose += [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sum(len(re.findall(r"[a-z']+", text.lower())) for text in prose)


def tokens_by_file(*folders: str) -> Counter[str]:
    """Count the tokens of each module in `folders`, by path."""
    paths = [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]
    return Counter(
        {
            path.relative_to(ROOT).as_posix(): count_tokens(path.read_text(encoding="utf-8"))
            for path in paths
        }
    )


def part_of(name: str) -> str:
    """Return the part of the package with the module `name`."""
    for part, prefixes in SATELLITES.items():
        if name.startswith(prefixes):
            return part
    return "core"


def measure() -> dict[str, int]:
    """Return the sizes limited by `tests/size.json`: modules, words of prose, tokens by part."""
    sources = sorted((ROOT / "specextend").rglob("*.py"))
    modules = [path for path in sources if path.name != "__init__.py"]
    words = sum(count_words(path.read_text(encoding="utf-8")) for path in sources)
    sizes = Counter(modules=len(modules), words=words, tests=tokens_by_file("tests").total())
    for name, tokens in tokens_by_file(*PRODUCT).items():
        sizes[part_of(name)] += tokens
    return dict(sizes)


if __name__ == "__main__":
    folders: Counter[str] = Counter()
    for module, number in tokens_by_file(*PRODUCT, "tests").items():
        folders[str(Path(module).parent)] += number
    for folder, number in sorted(folders.items()):
        print(f"{number:8,} {folder}")
    print(measure())
