"""The wheel: what it holds, and that it works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from zipfile import ZipFile

import pyarrow.parquet as pq
import pytest
import torch

from specextend.folders import models_folder
from tests.job.conftest import LONGEST_S, ROOT, ran

pytestmark = pytest.mark.slow
SHIPPED = ("configs", "models/smollm2-135m-eagle", "examples/demo")
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
ALONE = ["--no-deps", "--no-index"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """It is built from a copy, because setuptools leaves folders behind."""
    source = tmp_path_factory.mktemp("source")
    built = tmp_path_factory.mktemp("built")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("specextend", *SHIPPED):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    build = [*PIP, "wheel", *ALONE, "--no-build-isolation", "--wheel-dir", str(built), str(source)]
    subprocess.run(build, check=True, timeout=LONGEST_S)
    [wheel] = built.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def command(wheel, tmp_path_factory):
    """The script `specextend` of a fresh environment, which shares the libraries of this one, and nothing else."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "shared.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")  # whose own .pth files do not count
    python = f"{folder}/bin/python"
    subprocess.run([*PIP, "--python", python, "install", *ALONE, str(wheel)], check=True, timeout=LONGEST_S)
    return folder / "bin" / "specextend"


def call(command, folder, *arguments):
    """Run it in a folder, with a cache in which the models are that `make models` wrote."""
    models = folder / "cache" / "specextend" / "models"
    if not models.is_dir():
        models.parent.mkdir(parents=True)
        models.symlink_to(models_folder())
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables |= {"XDG_CACHE_HOME": f"{folder}/cache", "HF_HUB_OFFLINE": "1"}
    return ran(command, *arguments, cwd=folder, env=variables)


def test_the_wheel_holds_all_modules_and_what_they_need(wheel):
    """A new folder of the package must be named in pyproject.toml; type checkers look for py.typed."""
    held = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "specextend").rglob("*.py")}
    assert {name for name in held if name.endswith(".py")} == modules
    shipped = {f"specextend/shipped/{path.relative_to(ROOT)}" for at in SHIPPED for path in (ROOT / at).rglob("*.*")}
    assert held - modules == {"specextend/py.typed", "specextend/report/page.html"} | shipped


def test_the_tiny_pair_runs_from_the_wheel(command, tmp_path):
    """Outside the checkout: configuration, documents and page come out of the package."""
    ended = call(
        command, tmp_path, "run", "--config", "tiny-random", "--output", "out", "--set", "input.limit=3"
    ).exits(0)
    assert f"specextend report {tmp_path}/out prints it" in ended.stdout
    assert pq.read_table(tmp_path / "out" / "summaries").num_rows == 3
    assert "<svg" in (tmp_path / "out" / "report.html").read_text()
    assert call(command, tmp_path, "status", "out").stdout.startswith("complete: 3 of 3 rows done")
    assert call(command, tmp_path, "--version").stdout == "specextend 0.1.0\n"


def test_the_demo_runs_in_an_empty_folder(command, tmp_path):
    """With the draft and the documents of the wheel, and the target where an earlier demo has put it."""
    few = ["--set", "input.limit=1", "--set", "decoding.max_new_tokens=8"]
    call(command, tmp_path, "demo", *few).exits(0)
    assert {path.name for path in tmp_path.iterdir()} == {"out", "cache"}
    [summary] = pq.read_table(tmp_path / "out" / "demo" / "summaries").to_pylist()
    assert summary["doc_id"] == "govreport-1k-00"
    assert summary["length_bucket"] is not None
