"""The versions of a measurement or a run: of the libraries it depends on, and of this code."""

from __future__ import annotations

import hashlib
import json
import platform
import subprocess
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGES = ("specextend", "torch", "transformers", "ray", "pyarrow", "numpy")


def library_versions() -> dict[str, str]:
    """Return the versions of Python and of the libraries on which a result may depend."""
    installed = {package: package_version(package) or "not installed as a package" for package in _PACKAGES}
    return {"python": platform.python_version(), **installed}


def how_to_install(extra: str) -> str:
    """Return the command that adds an extra of this package, which no package index has."""
    return f"pip install '.[{extra}]' in the clone, or 'WHEEL[{extra}]' with the path of the wheel"


def package_version(package: str) -> str | None:
    """Return the version of an installed package; None if there is none."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


@cache
def code_commit() -> str | None:
    """Return the git commit of this code, ending in `-dirty` if it was edited since; None if that is unknown.

    It is known of a package that pip installed from a repository, and of a working copy.
    """
    try:
        installed = json.loads(metadata.distribution("specextend").read_text("direct_url.json") or "{}")
    except (metadata.PackageNotFoundError, ValueError):
        installed = {}
    if "vcs_info" in installed:
        return str(installed["vcs_info"]["commit_id"])
    folder = Path(__file__).parents[1]
    if not (folder / ".git").exists():
        return None
    command = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def code_sha256() -> str:
    """Compute a hash of this package's Python files, which tells edits apart that no commit holds."""
    folder, found = Path(__file__).parent, hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
        found.update(f"{path.relative_to(folder).as_posix()} {sha256}\n".encode())
    return found.hexdigest()
