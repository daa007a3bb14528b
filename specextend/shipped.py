"""The package as it is installed: its version, and what comes with it.

Those are the configurations, the draft of the default pair and the documents of the demo. In a
wheel they lie in the package, in a checkout beside it. Needs the standard library alone, for shell
completion.
"""

import json
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

from specextend.folders import cache_path

_PACKAGE = Path(__file__).parent
SHIPPED = _PACKAGE / "shipped" if (_PACKAGE / "shipped").is_dir() else _PACKAGE.parent
CONFIGS = SHIPPED / "configs"
TASKS = CONFIGS / "tasks"
MODELS = "{models}"
"""Stands in the name of a model for `models_folder()` of the machine that loads it."""
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
"""Folder of the default pair's target in `models_folder()`."""


def shipped_configs() -> dict[str, Path]:
    """List the files of the shipped configurations by name: the pairs, then the tasks, which are
    given beside one.
    """
    return {
        path.stem: path for folder in (CONFIGS, TASKS) for path in sorted(folder.glob("*.yaml"))
    }


def find_config(config: str | Path, folder: str = "") -> Path:
    """Return the file of a shipped configuration's name; anything else is a path, relative to
    `folder`.
    """
    return shipped_configs().get(str(config), Path(folder, config))


def models_folder() -> Path:
    """Return the folder of models that were made or fetched: `.models` of a checkout if `make
    models` has made it, or else in the user's cache.

    The copy of a checkout that is uploaded with a job has none: Ray removes it after the job.
    """
    made = SHIPPED / ".models"
    return made if made.is_dir() else cache_path() / "models"


def on_this_machine(model: str) -> str:
    """Return the name of a model with the folders of this machine in the place of `{models}` and
    `{shipped}`.

    A configuration keeps them as they are, because each node of a cluster has its own.
    """
    return model.replace(MODELS, str(models_folder())).replace("{shipped}", str(SHIPPED))


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_commit() -> str | None:
    """Return the git commit of this code, ending in `-dirty` if it was edited since; None if that
    is unknown.

    It is known of a package that pip installed from a repository, and of a working copy.
    """
    try:
        installed = json.loads(
            metadata.distribution("specextend").read_text("direct_url.json") or "{}"
        )
    except (metadata.PackageNotFoundError, ValueError):
        installed = {}
    if "vcs_info" in installed:
        return str(installed["vcs_info"]["commit_id"])
    folder = _PACKAGE.parent
    if not (folder / ".git").exists():
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=True, timeout=10
        ).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None
