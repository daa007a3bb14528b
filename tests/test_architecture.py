"""What we would say in every review, written once. The messages say what to do instead."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import specextend

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specextend"
SOURCES = sorted(path for folder in ("specextend", "jobs", "scripts") for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# From the ground up; a name imports only from lines above its own, and from itself.
LAYERS = (
    {"stats", "file_hashes"},
    {"core", "checkpoint", "gguf_cache"},
    {"hub"},
    {"model_files"},
    {"attention", "terminal"},
    {"decoding"},
    {"models", "data", "drafters"},
    {"config"},
    {"pairing"},
    {"loading"},
    {"cluster", "bench", "training", "report"},
    {"jobs"},
)
ALSO = {("bench", "report"), ("core", "stats")}
OWNERS = {
    "ray": ("specextend/cluster/", "jobs/"),
    "pyarrow": ("specextend/data/", "specextend/report/", "specextend/bench/", "scripts/"),
    "transformers": (
        "specextend/models.py",
        "specextend/attention/hf.py",
        "specextend/bench/",
        "specextend/training/",
        "scripts/",
    ),
    "huggingface_hub": ("specextend/hub.py",),
    "flash_attn": ("specextend/attention/backends.py",),
    "triton": ("specextend/attention/tree_kernel.py",),
    "numba": ("specextend/attention/",),
    "llvmlite": ("specextend/attention/",),
    "datasets": ("specextend/data/importers.py",),
    "xllamacpp": ("specextend/bench/llama_cpp.py", "specextend/bench/llama_server.py"),
    "matplotlib": ("specextend/bench/plot.py", "specextend/report/plots.py"),
    "jinja2": ("specextend/report/page.py",),
    "pydantic": ("specextend/config.py",),
    "yaml": ("specextend/config.py",),
    "regex": ("specextend/data/quality.py",),
    "rapidfuzz": ("specextend/data/quality.py",),
    "py3langid": ("specextend/data/quality.py",),
}
MAX_LINES = 60
USUAL_LINES = 30
USUAL_SHARE = 0.9


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path: Path) -> Iterator[str]:
    """Every module a file imports, also inside functions and for type checking."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively; write the whole name"
            assert node.module is not None
            yield node.module
            if node.module == "specextend":
                yield from (f"specextend.{alias.name}" for alias in node.names)


def layer_of(part: str) -> int:
    found = [number for number, names in enumerate(LAYERS) if part in names]
    assert found, f"{part} has no layer: give it a line in LAYERS, which is the layout of the project"
    return found[0]


def part_of(module: str) -> str | None:
    """`data` of `specextend.data.parts`; None for the package itself and for third parties."""
    first, _, rest = module.partition(".")
    if first == "jobs":
        return "jobs"
    return rest.partition(".")[0] or None if first == "specextend" else None


@pytest.mark.parametrize("path", [path for path in SOURCES if path != PACKAGE / "__init__.py"], ids=name_of)
def test_imports_point_one_way(path):
    """A part that knows nothing above itself can be read, tested and replaced alone."""
    own = part_of(name_of(path).removesuffix(".py").replace("/", "."))
    if own is None:
        return
    for module in imports_of(path):
        other = part_of(module)
        if other in (None, own) or (own, other) in ALSO:
            continue
        assert layer_of(other) < layer_of(own), (
            f"{name_of(path)} ({own}) imports {module}: {other} lies beside or above it. "
            "Move what both need down, or let the caller hand it in."
        )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_third_parties_are_imported_where_they_belong(path):
    """Each has one owner, so that its quirks and its replacement stay in one place."""
    for module in imports_of(path):
        owners = OWNERS.get(module.partition(".")[0])
        assert owners is None or name_of(path).startswith(owners), (
            f"{name_of(path)} imports {module}, which belongs to {', '.join(owners)}; call what is there"
        )


def functions(paths: list[Path]) -> Iterator[tuple[str, int]]:
    """Where each function stands, and its lines."""
    for path in paths:
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                yield f"{name_of(path)}:{node.lineno} {node.name}", node.end_lineno - node.lineno + 1


def test_no_function_is_long():
    """One that does not fit on a screen does more than one thing."""
    too_long = [f"{where} ({lines} lines)" for where, lines in functions(SOURCES + TESTS) if lines > MAX_LINES]
    assert not too_long, f"split by what each part does: {', '.join(too_long)}"


def test_nine_functions_in_ten_are_short():
    """The 90th percentile, not the median, tells readable code from the rest."""
    lengths = list(functions(SOURCES))
    long = sorted(((lines, where) for where, lines in lengths if lines >= USUAL_LINES), reverse=True)
    assert len(long) <= (1 - USUAL_SHARE) * len(lengths), f"shorten some of: {long[:20]}"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_the_package_does_not_print(path):
    """Output belongs to the jobs; a library that prints cannot be used by another."""
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id != "print", f"{name_of(path)}:{node.lineno} prints; return it, or log it"


@pytest.mark.parametrize("path", SOURCES + TESTS, ids=name_of)
def test_no_failure_is_swallowed(path):
    """A failure is a value or an exception. One that is passed over is found in the output, months later."""
    for node in ast.walk(tree_of(path)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = ast.unparse(node.type) if node.type else "everything"
        silent = all(isinstance(each, ast.Pass | ast.Continue) for each in node.body)
        broad = caught in ("everything", "Exception", "BaseException")
        assert not (silent and broad), (
            f"{name_of(path)}:{node.lineno} catches {caught} and goes on; name the error, or make it a value"
        )


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_a_module_is_named_for_what_it_holds(path):
    """`utils` is where nouns go to be forgotten."""
    assert path.stem not in ("utils", "helpers", "common", "misc"), f"{name_of(path)}: name it for its noun"


def test_no_two_modules_or_classes_share_a_name():
    """Whoever searches for a name must find one thing; an underscore before it makes no other name."""
    modules = Counter(path.stem for path in PACKAGE.rglob("*.py") if path.stem != "__init__")
    classes = Counter(
        node.name.lstrip("_")
        for path in PACKAGE.rglob("*.py")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.ClassDef)
    )
    twice = [name for names in (modules, classes) for name, count in names.items() if count > 1]
    assert not twice, f"rename one of each: {', '.join(twice)}"


def private_names(paths: list[Path]) -> set[str]:
    """Names with an underscore that the files define: functions, classes, attributes that are set."""
    nodes = [node for path in paths for node in ast.walk(tree_of(path))]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in defined if name.startswith("_") and not name.startswith("__")}


def test_tests_see_what_a_user_sees():
    """A test of private names holds the code as it is written, and lets what it does change."""
    ours = private_names(sorted(PACKAGE.rglob("*.py"))) - private_names(TESTS)
    assert "_step" in private_names(sorted(PACKAGE.rglob("*.py")))
    used = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in ours)
        or (isinstance(node, ast.ImportFrom) and ours.intersection(alias.name for alias in node.names))
    ]
    assert not used, f"go through what is public: {', '.join(used)}"


def option_classes() -> Iterator[type]:
    for path in sorted(PACKAGE.rglob("*.py")):
        names = [node.name for node in ast.walk(tree_of(path)) if isinstance(node, ast.ClassDef)]
        for name in names:
            if name.endswith("Options"):
                module = name_of(path).removesuffix(".py").replace("/", ".")
                yield getattr(importlib.import_module(module), name)


@pytest.mark.parametrize("options", list(option_classes()), ids=lambda options: options.__name__)
def test_options_are_frozen_keyword_only_and_described(options):
    """A mistyped option stops the program, and nobody changes one while it runs."""
    assert dataclasses.is_dataclass(options)
    assert options.__dataclass_params__.frozen, f"{options.__name__} must be frozen"
    assert all(field.kw_only for field in dataclasses.fields(options)), f"{options.__name__} must be kw_only"
    assert options.__doc__, f"{options.__name__} must say which section it is"


def test_the_public_names_are_these():
    """Others build on them: adding one is a promise, removing one breaks somebody."""
    assert specextend.__all__ == ["Completion", "Request", "RunConfig", "SamplingParams", "load_engine"]
    assert all(getattr(specextend, name).__name__ == name for name in specextend.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    """The names are imported lazily; a typing error must still fail as in any other module."""
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        specextend.Engin  # noqa: B018


@pytest.mark.parametrize("module", ["specextend.stats", "specextend.core"])
def test_the_ground_floor_needs_the_standard_library_alone(module):
    """Schedulers and reports count without waiting seconds for torch."""
    code = f"import {module}, sys; sys.exit(any(m in sys.modules for m in ('torch', 'transformers', 'pyarrow', 'ray')))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
