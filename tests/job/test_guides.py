"""The pages that people follow: their commands are taken, their keys exist, their links lead somewhere."""

import ast
import re
import shlex

import pytest

from specextend.cli.demo import SETTINGS
from specextend.config import RunConfig
from tests.job.conftest import ROOT, parse

GUIDES = sorted(ROOT / "docs" / name for name in ("choosing-a-pair.md", "first-run.md", "tuning.md"))
RECORDS = {"decisions.md", "log.md", "CHANGELOG.md"}  # what was true on its day
PAGES = sorted((*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), ROOT / "benchmarks/README.md"))
KEYS = set(re.findall(r"^\| `(\w+\.\w+)` \|", (ROOT / "docs" / "configuration.md").read_text(), re.MULTILINE))


def prose(page):
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)


def anchors(page):
    """The names that a heading has in links, as forges make them."""
    heads = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).replace(" ", "-") for head in heads}


@pytest.mark.parametrize("page", GUIDES, ids=lambda page: page.stem)
def test_the_job_takes_the_commands_of_a_guide(page, monkeypatch):
    """A reader who copies a command that is refused stops reading."""
    monkeypatch.chdir(ROOT)
    called = r"^(?:\.venv/bin/)?specextend (?:plan|run) (.*)$"
    lines = re.findall(called, page.read_text().replace("\\\n", ""), re.MULTILINE)
    assert lines
    for line in lines:
        line = line.replace("reports.yaml", "smollm2")  # which `init` begins it from
        status, parsed = parse(shlex.split(line, comments=True))
        assert status or RunConfig.load(parsed.config, parsed.overrides)


def test_the_demo_names_its_own_columns():
    """The configuration that it uses is everybody's, and knows no column but `text`."""
    config = RunConfig.load("smollm2", SETTINGS)
    assert (config.input.id_column, config.input.passthrough) == (
        "doc_id",
        ("title", "reference_summary", "length_bucket"),
    )
    plain = RunConfig.load("smollm2")
    assert (plain.input.id_column, plain.input.passthrough, plain.job.cpus_per_worker) == (None, (), "auto")


def test_a_pipeline_has_a_cpu_left_to_read_with():
    """The example reserved both CPUs of its machine for the actor: nothing was ever read, and it waited for ever."""
    [code] = re.findall(
        r"^```python$(.*?map_batches.*?)^```$", (ROOT / "docs/cluster.md").read_text(), re.M | re.DOTALL
    )
    calls = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call)]
    given = {ast.unparse(call.func): {word.arg: word.value for word in call.keywords} for call in calls}
    of_ray = ast.literal_eval(given["ray.init"]["num_cpus"])
    actors, each = (ast.literal_eval(given["documents.map_batches"][name]) for name in ("concurrency", "num_cpus"))
    assert of_ray > actors * each


@pytest.mark.parametrize("page", [page for page in PAGES if page.name not in RECORDS], ids=lambda page: page.stem)
def test_the_keys_that_a_page_names_exist(page):
    """Keys are renamed, and a guide that says to turn one of the old ones is worse than none."""
    sections = "|".join(RunConfig.model_fields)
    named = set(re.findall(rf"`((?:{sections})\.[a-z_]+)\b(?!\.)", prose(page)))
    files = {"report.json", "report.html", "report.py", "job.py"}
    assert named - KEYS - files == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_the_links_of_a_page_lead_somewhere(page):
    """To a file, and to a heading that is there."""
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        there = page.parent / path if path else page
        assert there.exists(), link
        assert not anchor or anchor in anchors(there), link
