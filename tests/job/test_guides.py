"""The pages that people follow: their commands are taken, and their keys exist. `make docs` follows their links."""

import re
import shlex
from contextlib import nullcontext, suppress

import click
import pytest

from specextend.cli.main import specextend
from specextend.cli.run import Arguments
from specextend.config import RunConfig
from specextend.folders import shipped_configs
from tests.job.conftest import ROOT, text_of

FOLDERS = (".", ".github/**", "benchmarks", "docs/**", "examples", "models/*", "specextend/**")
PAGES = sorted({page for folder in FOLDERS for page in ROOT.glob(f"{folder}/*.md")})
RECORDS = {"decisions.md", "log.md", "CHANGELOG.md"}  # what was true on its day
LONGEST = 80
"""Words of a paragraph, of an item of a list or of a cell."""
KEYS = set(re.findall(r"^\| `(\w+\.\w+)` \|", text_of("docs/configuration.md"), re.MULTILINE))


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def command_lines(page):
    """The lines of `specextend` in blocks of a shell, and those in sentences, which may leave out what is required."""
    text = page.read_text().replace("\\\n", "").replace("$(date +%F)", "2026-11-22").replace("reports.yaml", "smollm2")
    for line in re.findall(r"^(?:\S+/)?specextend ([^;&\n]*)", text, re.MULTILINE):
        yield line, nullcontext()
    for line in re.findall(r"`specextend ([^`]+)`", prose(page)):
        yield line, suppress(click.MissingParameter)


def context_of(words):
    """What the parser makes of a command line."""
    command = specextend
    while isinstance(command, click.Group) and words:
        _, command, words = command.resolve_command(click.Context(command), words)
    return command.make_context("", words)


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_command_lines_of_a_page_are_taken(page, monkeypatch):
    """A reader who copies a command that is refused stops reading."""
    monkeypatch.chdir(ROOT)
    refused = []
    for line, allowed in command_lines(page):
        try:
            with allowed:
                given = context_of(shlex.split(line, comments=True)).params
                if "run_date" in given and shipped_configs().keys() >= set(given["config"]):
                    RunConfig.load(given["config"], Arguments(**given).overrides)
        except (click.ClickException, ValueError) as error:
            refused.append(f"{line}: {error}")
    assert refused == []


def test_the_command_lines_of_helps_and_of_what_is_deployed_are_taken():
    """Options have gone before, and were named on for months by what no page shows."""
    files = [
        path for folder in ("configs", "deploy", "jobs", "specextend/cli") for path in (ROOT / folder).rglob("*.*")
    ]
    texts = [path.read_text() for path in files if path.suffix in (".md", ".py", ".service", ".sh", ".yaml")]
    for line in re.findall(r"^ {4}specextend ([a-z][^`\n]*)$", "\n".join(texts), re.MULTILINE):
        context_of(shlex.split(line, comments=True))
    told = re.findall(r"`specextend ([a-z]+)", "\n".join(texts))
    assert set(told) <= specextend.commands.keys()


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_the_paragraphs_of_a_page_are_short(page):
    """Nobody reads two hundred words in a row, not even to find the one that they need."""
    pieces = re.split(r"\n\s*\n|\n *(?:[-*]|\d+\.) |\|", prose(page))
    assert [piece for piece in pieces if len(piece.split()) > LONGEST] == []


def test_a_pipeline_has_a_cpu_left_to_read_with():
    """The example reserved both CPUs of its machine for the actor: nothing was ever read, and it waited for ever."""
    page = text_of("docs/cluster.md")
    names = (r"init\(num_cpus", " concurrency", " num_cpus")
    of_ray, actors, each = (int(re.search(rf"{name}=(\d+)", page)[1]) for name in names)
    assert of_ray > actors * each


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RECORDS], ids=str)
def test_the_keys_that_a_page_names_exist(page):
    """Keys are renamed, and a guide that says to turn one of the old ones is worse than none."""
    sections = "|".join(RunConfig.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?!\.)", prose(page)))
    files = {"report.json", "report.html", "report.py", "job.py"}
    assert named - KEYS - files == set()
