"""What we would say in every review, written once. The messages say what to do instead."""

import ast
import dataclasses
import importlib
import json
import re
import sys
import tomllib
from functools import cache
from itertools import chain, pairwise
from pathlib import Path

import pytest

import specextend
from scripts.size import measure
from tests.tables import cases

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "specextend"
FOLDERS = ("specextend", "benchmarks", "jobs", "scripts")
SOURCES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
TESTS = sorted((ROOT / "tests").rglob("*.py"))

# From the ground up; a name imports only from lines above its own, and from itself.
LAYERS = (
    "folders",
    "stats reference",
    "core",
    "models/model_files",
    "models/checkpoints",
    "attention terminal",
    "decoding",
    "models/causal_lm data drafters",
    "proof",
    "config",
    "models/pairing requests",
    "models/loading",
    "summarizer",
    "report",
    "cluster training documents",
    "job",
    "cli",
    "benchmarks",
    "jobs __main__",
)
OWNERS = dict(
    cases("""
    ray -> specextend/cluster/
    pyarrow -> specextend/data/ specextend/documents/ specextend/report/ specextend/summarizer.py \
specextend/training/ benchmarks/ scripts/
    transformers -> specextend/models/causal_lm.py specextend/decoding/stock.py specextend/data/prompts.py \
benchmarks/peers.py benchmarks/sources.py benchmarks/gpu_pairs.py specextend/proof/ scripts/
    huggingface_hub -> specextend/models/model_files.py
    flash_attn -> specextend/attention/torch_kernels.py
    flash_attn_interface -> specextend/attention/torch_kernels.py
    torchao -> specextend/decoding/quantized.py
    triton -> specextend/attention/triton_kernels.py
    numba -> specextend/attention/
    llvmlite -> specextend/attention/
    duckdb -> specextend/data/
    datasets -> specextend/documents/table_rows.py
    pypdfium2 -> specextend/documents/pdf.py
    pypdf -> specextend/documents/pdf.py
    mammoth -> specextend/documents/zipped_xml.py
    markdown_it -> specextend/documents/text.py
    selectolax -> specextend/documents/html.py
    webencodings -> specextend/documents/html.py
    xllamacpp -> benchmarks/llama_server.py
    matplotlib -> benchmarks/tables.py
    pandas -> benchmarks/tables.py
    jinja2 -> specextend/report/build.py specextend/data/instructions.py specextend/data/prompts.py
    pydantic -> specextend/config.py specextend/data/run_folder.py specextend/documents/batch_requests.py \
specextend/drafters/ benchmarks/benchmark.py
    yaml -> specextend/config.py specextend/documents/text.py benchmarks/benchmark.py
    click -> specextend/cli/
    regex -> specextend/data/quality.py
    rapidfuzz -> specextend/data/quality.py benchmarks/run.py benchmarks/sources.py
    llguidance -> specextend/decoding/grammar.py specextend/data/answers.py
    py3langid -> specextend/data/quality.py
""")
)
"""Third party -> the folders and modules that may import it."""
UNDECLARED = dict(
    cases("""
        llvmlite -> numba is made of it
        markdown_it -> markdown-it-py
        markupsafe -> jinja2 is made of it
        pydantic_core -> pydantic is made of it
        yaml -> pyyaml
        flash_attn_interface -> flash-attn of another generation
    """)
)
"""What the package imports under a name that `pyproject.toml` does not have, and why."""
SIZE = ROOT / "tests" / "size.json"
"""The most modules (without `__init__`), words of docstrings and comments, and tokens of each part."""


def name_of(path):
    return path.relative_to(ROOT).as_posix()


@cache
def tree_of(path):
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imports_of(path):
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


def layer_of(part):
    found = [number for number, names in enumerate(LAYERS) if part in names.split()]
    assert found, f"{part} has no layer: give it a line in LAYERS, which is the layout of the project"
    return found[0]


def part_of(module):
    """`data` of `specextend.data.commits`; None for the package's public names and for third parties.

    The modules of `models` are parts of their own: its files are read below the engine, its pairs are loaded above.
    """
    first, _, rest = module.partition(".")
    if first in ("benchmarks", "jobs"):
        return first
    if first != "specextend" or rest in specextend.__all__:
        return None
    if rest.startswith("models."):
        return rest.replace(".", "/")
    return rest.partition(".")[0] or None


def test_imports_point_one_way():
    """A part that knows nothing above itself can be read, tested and replaced alone."""
    wrong = []
    for path in SOURCES:
        own = part_of(name_of(path).removesuffix(".py").replace("/", "."))
        if own is None or path.name == "__init__.py":
            continue
        for module in imports_of(path):
            other = part_of(module)
            is_allowed = other in (None, own) or layer_of(other) < layer_of(own)
            if not is_allowed:
                wrong.append(f"{name_of(path)} ({own}) imports {module}")
    assert not wrong, (
        f"{'; '.join(wrong)}: that lies beside or above it. Move what both need down, or let the caller hand it in."
    )


def test_the_page_of_the_architecture_shows_these_layers():
    """A drawing that has gone stale leads a reader to folders that are not there."""
    _, picture, _, layers, _ = (ROOT / "docs" / "architecture.md").read_text().split("```")
    listed = [
        name for line in layers.splitlines() for name in re.match(r"((\w+(/\w+\.py|/|\.py) +)*)", line + " ")[0].split()
    ]
    parts = [name.removesuffix("/").removesuffix(".py") for name in listed]
    assert {*parts} == {*" ".join(LAYERS).split()} - {"__main__"}
    numbers = [layer_of(part) for part in parts]
    assert numbers == sorted(numbers, reverse=True)
    drawn = re.findall(r"\w+/(?:\w+\.py)?", " ".join(re.findall(r"\(.*?\)", picture)))
    assert drawn
    assert [name for name in drawn if not (PACKAGE / name).exists()] == []


def test_third_parties_are_imported_where_they_belong():
    """Each has one owner, so that its quirks and its replacement stay in one place."""
    wrong = [
        f"{name_of(path)} imports {module}, which belongs to {owners}"
        for path in SOURCES
        for module in imports_of(path)
        if (owners := OWNERS.get(module.partition(".")[0])) and not name_of(path).startswith(tuple(owners.split()))
    ]
    assert not wrong, f"call what is there: {'; '.join(wrong)}"


def test_what_the_package_imports_is_declared():
    """A package that comes along with another is gone when that one no longer needs it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *chain(*project["optional-dependencies"].values())]
    names = {re.match(r"[\w-]+", each)[0].lower().replace("-", "_") for each in declared}
    imported = {module.partition(".")[0] for path in PACKAGE.rglob("*.py") for module in imports_of(path)}
    assert imported - names - sys.stdlib_module_names == {"specextend"} | UNDECLARED.keys()


def names_a_device(node):
    """`"cpu"`, `torch.cuda` or `device.type`, wherever they stand."""
    if isinstance(node, ast.Attribute):
        owner = node.value.attr if isinstance(node.value, ast.Attribute) else getattr(node.value, "id", None)
        return node.attr == "cuda" or (node.attr == "type" and owner == "device")
    return isinstance(node, ast.Constant) and node.value in ("cpu", "cuda")


@pytest.mark.parametrize("path", sorted((PACKAGE / "decoding").glob("*.py")), ids=name_of)
def test_only_one_module_of_decoding_knows_the_names_of_devices(path):
    """What differs between them is found in one place, and a third kind of device is one more line there."""
    if path.name == "device.py":
        return
    lines = [node.lineno for node in ast.walk(tree_of(path)) if names_a_device(node)]
    assert not lines, f"{name_of(path)}, lines {lines}: ask decoding/device.py for what differs, by a name of its own"


def test_the_project_does_not_grow():
    """Each part has a limit of its own, so that a satellite cannot grow at the core's expense.

    `python -m scripts.size` shows where it is.
    """
    size = measure()
    most = json.loads(SIZE.read_text())
    assert size.keys() == most.keys()
    assert all(size[name] <= most[name] for name in size), f"{size}, but {name_of(SIZE)} allows {most}"


def test_a_count_agrees_with_its_noun():
    """`1 rows` in a log is the first that a new user reads of us."""
    nouns = re.compile(r" (error |more )?(documents|rows|files|workers|starts|threads|errors|parts|texts)\b")
    wrong = [
        f"{name_of(path)}:{node.lineno}"
        for path in SOURCES
        if not path.is_relative_to(ROOT / "scripts")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.JoinedStr)
        for value, text in pairwise(node.values)
        if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant) and nouns.match(str(text.value))
    ]
    assert not wrong, f"write `counted(count, noun)` of core.py: {', '.join(wrong)}"


def test_a_module_is_named_for_what_it_holds():
    """`utils` is where nouns go to be forgotten."""
    wrong = [name_of(path) for path in SOURCES if path.stem in ("utils", "helpers", "common", "misc")]
    assert not wrong, f"name each for its noun: {', '.join(wrong)}"


def private_names(paths):
    """Names with an underscore that the files define: functions, classes, attributes that are set."""
    nodes = [node for path in paths for node in ast.walk(tree_of(path))]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    defined |= {node.attr for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)}
    return {name for name in defined if name.startswith("_") and not name.startswith("__")}


def test_tests_see_what_a_user_sees():
    """A test of private names holds the code as it is written, and lets what it does change."""
    defined = private_names(PACKAGE.rglob("*.py"))
    assert "_step" in defined
    ours = defined - private_names(TESTS)
    used = [
        f"{name_of(path)}:{node.lineno}"
        for path in TESTS
        for node in ast.walk(tree_of(path))
        if (isinstance(node, ast.Attribute) and node.attr in ours)
        or (isinstance(node, ast.ImportFrom) and ours.intersection(alias.name for alias in node.names))
    ]
    assert not used, f"go through what is public: {', '.join(used)}"


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "contract").glob("*.py")), ids=name_of)
def test_the_contract_knows_the_public_names_alone(path):
    """What moves inside the package must not touch it; helpers that make tiny models are beside it."""
    allowed = {f"specextend.{name}" for name in specextend.__all__} | {"specextend"}
    inner = {module for module in imports_of(path) if module.partition(".")[0] == "specextend"} - allowed
    assert not inner, f"{name_of(path)} imports {', '.join(sorted(inner))}: go through what is public"


def option_classes():
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
    engine = ["Completion", "Request", "SamplingParams", "load_engine"]
    job = ["RunConfig", "RunResult", "run"]
    assert sorted(specextend.__all__) == sorted([*engine, *job, "Summarizer", "find_figures"])
    assert all(getattr(specextend, name).__name__ == name for name in specextend.__all__)


def test_an_unknown_public_name_is_an_attribute_error():
    """The names are imported lazily; a typing error must still fail as in any other module."""
    with pytest.raises(AttributeError, match="no attribute 'Engin'"):
        specextend.Engin  # noqa: B018
