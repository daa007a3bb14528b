"""What a tag publishes: metadata, workflows and citation that agree with each other."""

import re
import tomllib

import yaml

from tests.job.conftest import ROOT, text_of

PROJECT = tomllib.loads(text_of("pyproject.toml"))["project"]
WORKFLOWS = {path.stem: path.read_text() for path in (ROOT / ".github" / "workflows").glob("*.yml")}


def test_actions_are_pinned_by_hash():
    """A tag of an action can be moved to other code, and that code could publish a wheel in our name."""
    used = [line.strip(" -") for text in WORKFLOWS.values() for line in text.splitlines() if "uses:" in line]
    assert len(used) > 8
    assert [line for line in used if not re.fullmatch(r"uses: [\w-]+/[\w-]+@[0-9a-f]{40} # v[\d.]+", line)] == []


def test_the_versions_that_are_named_are_tested():
    """A classifier promises a Python version; the matrix is where the promise is kept."""
    versions = yaml.safe_load(WORKFLOWS["ci"])["jobs"]["ci"]["strategy"]["matrix"]["python"]
    prefix = "Programming Language :: Python :: 3."
    assert [f"{prefix}{version.removeprefix('3.')}" for version in versions] == [
        line for line in PROJECT["classifiers"] if line.startswith(prefix)
    ]


def test_the_citation_is_of_this_version():
    """Who cites a version must find it."""
    citation = yaml.safe_load(text_of("CITATION.cff"))
    assert citation["version"] == PROJECT["version"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]
