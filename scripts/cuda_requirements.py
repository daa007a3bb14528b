"""Record the requirements of torch's CUDA wheel, because CI installs only the CPU wheel.

    python -m scripts.cuda_requirements > tests/install/cuda_requirements.json

pip resolves all packages for Linux with CUDA under constraints.txt, which proves that a GPU
installation can be resolved. Takes a minute and a package index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent


def resolve() -> list[dict]:
    """Return pip's metadata of all packages of an installation with every tested extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [*project["dependencies"], *extras["dev"], *extras["docs"]]
    torch = next(
        line
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line.startswith("torch==")
    )
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
    command += ["--only-binary=:all:", "--use-feature=fast-deps", "--report=-"]
    command += ["--constraint", str(ROOT / "constraints.txt"), torch.replace("==", "===")]
    environment = os.environ | {"PIP_FIND_LINKS": "", "PIP_CONFIG_FILE": os.devnull}
    report = subprocess.run(
        [*command, *wanted], check=True, stdout=subprocess.PIPE, env=environment
    ).stdout
    return [each["metadata"] for each in json.loads(report)["install"]]


def main() -> None:
    """Print the record."""
    found = {each["name"].lower(): each for each in resolve()}
    cuda = {
        name: each["version"]
        for name, each in sorted(found.items())
        if name.startswith(("cuda-", "nvidia-"))
    }
    torch = found["torch"]
    print(
        json.dumps(
            {"torch": torch["version"], "requires_dist": torch["requires_dist"], "cuda": cuda},
            indent=2,
        )
    )


if __name__ == "__main__":
    main()
