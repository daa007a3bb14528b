"""What `ray job submit --working-dir .` sends, by Ray's own packaging."""

import logging
import shutil
from pathlib import Path
from zipfile import ZipFile

from ray._private.ray_constants import get_runtime_env_default_excludes
from ray._private.runtime_env.packaging import create_package

from tests.job.conftest import ROOT

LARGEST_BYTES = 16 << 20
"""Of the upload: Ray refuses 100 MiB, and every node fetches and unpacks it before a job begins."""


def pack(folder, package):
    """Write what is sent of a folder; returns the files' names."""
    excludes = get_runtime_env_default_excludes()
    create_package(str(folder), package, include_gitignore=True, excludes=excludes, logger=logging.getLogger(__name__))
    return {name for name in ZipFile(package).namelist() if not name.endswith("/")}


def test_the_upload_holds_what_a_job_needs_and_no_more(tmp_path):
    """Every config, every module and the shipped draft; no document, no test, no history. It is small."""
    package = tmp_path / "package.zip"
    sent = pack(ROOT, package)
    assert package.stat().st_size < LARGEST_BYTES
    needed = [path for folder in ("specextend", "jobs") for path in (ROOT / folder).rglob("*.py")]
    needed += [*(ROOT / "configs").glob("*.yaml"), *(ROOT / "models" / "smollm2-135m-eagle").iterdir()]
    assert sent >= {path.relative_to(ROOT).as_posix() for path in needed}
    folders = {name.partition("/")[0] for name in sent if "/" in name}
    assert folders == {"specextend", "jobs", "configs", "models"}
    assert {Path(name).suffix for name in sent}.isdisjoint({".parquet", ".gguf", ".whl", ".pyc"})
    assert [name for name in sent if name.endswith(".safetensors")] == ["models/smollm2-135m-eagle/model.safetensors"]


def test_a_model_or_document_left_among_the_code_stays_at_home(tmp_path):
    """The 100 MiB that Ray refuses are soon reached; and a document is nobody else's business.

    `pip install .` leaves a second copy of the package in `build/`, which would be uploaded, and found by tests.
    """
    for name in (".gitignore", ".rayignore"):
        shutil.copy(ROOT / name, tmp_path)
    left = ("jobs/a.parquet", "models/mine/model.safetensors", "models/mine/config.json", "configs/model.safetensors")
    left += ("b.gguf", "build/lib/specextend/core.py")
    for name in (*left, "specextend/core.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("content")
    assert pack(tmp_path, tmp_path.parent / f"{tmp_path.name}.zip") == {".rayignore", "specextend/core.py"}
