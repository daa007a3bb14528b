"""The installed package: its version and its data files.

Data files are inside the package of a wheel, or next to it in a checkout. Only the standard library
is imported, for fast shell completion.
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
"""Placeholder in model names for `models_folder()` of the loading machine."""
DEFAULT_TARGET = "SmolLM2-135M-Instruct"
"""Folder of the default target in `models_folder()`."""


def shipped_configs() -> dict[str, Path]:
    """List shipped configurations by name: pairs, then tasks."""
    return {
        path.stem: path for folder in (CONFIGS, TASKS) for path in sorted(folder.glob("*.yaml"))
    }


def find_config(config: str | Path, folder: str = "") -> Path:
    """Return the file of a shipped name, or a path relative to `folder`."""
    return shipped_configs().get(str(config), Path(folder, config))


def models_folder() -> Path:
    """Return `.models` of a checkout after `make models`, else a folder of the user's cache.

    A checkout uploaded with a Ray job has no `.models`, because Ray deletes it after the job.
    """
    made = SHIPPED / ".models"
    return made if made.is_dir() else cache_path() / "models"


def on_this_machine(model: str) -> str:
    """Replace `{models}` and `{shipped}` by folders of this machine.

    Configurations keep the placeholders, because nodes of a cluster have different folders.
    """
    return model.replace(MODELS, str(models_folder())).replace("{shipped}", str(SHIPPED))


def package_version(package: str) -> str | None:
    """Return the version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_commit() -> str | None:
    """Return the git commit of this code, with `-dirty` after local edits; None if unknown."""
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
