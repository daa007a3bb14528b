"""What a tag publishes: metadata, workflows and citation that agree with each other."""

import re
import subprocess
import tomllib

import yaml

from tests.job.conftest import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["references"][0]["url"] == PROJECT["urls"]["Paper"]


def test_a_release_takes_the_tag_of_its_version_alone_and_names_its_repository(tmp_path):
    """The two commands of the workflow run here as they stand there: a pattern that matches nothing is silent."""
    steps = yaml.safe_load(WORKFLOWS["release"])["jobs"]["wheel"]["steps"]
    refuse, name = [step["run"] for step in steps if step.get("name", "").startswith(("Refuse", "Name"))]
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())

    def ended(command, **variables):
        return subprocess.run(
            ["bash", "-c", command], cwd=tmp_path, env={"PATH": "/usr/bin:/bin", **variables}
        ).returncode

    assert ended(refuse, GITHUB_REF_NAME=f"v{PROJECT['version']}") == 0
    assert ended(refuse, GITHUB_REF_NAME="v9.9.9") == 1
    assert ended(name, GITHUB_SERVER_URL="https://forge.example", GITHUB_REPOSITORY="some/where") == 0
    urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
    assert urls == PROJECT["urls"] | {
        "Repository": "https://forge.example/some/where",
        "Issues": "https://forge.example/some/where/issues",
        "Changelog": "https://forge.example/some/where/blob/main/CHANGELOG.md",
    }
