"""A file is there whole or not at all, on every file system."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
from pyarrow import fs

from specextend.data.storage import (
    Location,
    atomic_output,
    create_bytes,
    delete,
    exists,
    list_files,
    read_bytes,
    remove_temporary_files,
    resolve,
    write_bytes,
)

ROOT = str(Path(__file__).parents[2])


@pytest.fixture(params=["local", "other"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Location:
    """A local folder, and the same through a file system that has no local paths."""
    if request.param == "local":
        return resolve(str(tmp_path / "folder"))
    return Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "folder")


def test_what_was_written_is_read_back_and_replaced_whole(folder: Location) -> None:
    location = folder.child("a", "b.json")
    assert read_bytes(location) is None
    write_bytes(location, b"first, and longer")
    write_bytes(location, b"second")
    assert read_bytes(location) == b"second"
    assert list_files(folder.child("a")) == ["b.json"]
    delete(location)
    delete(location)
    assert not exists(location)


def test_a_file_that_is_created_is_never_replaced(folder: Location) -> None:
    """The manifest is written once: a second writer must notice the first."""
    assert create_bytes(folder.child("manifest"), b"mine")
    assert not create_bytes(folder.child("manifest"), b"theirs")
    assert read_bytes(folder.child("manifest")) == b"mine"
    assert list_files(folder) == ["manifest"]


def test_a_failure_while_writing_leaves_what_was_there(folder: Location) -> None:
    location = folder.child("summary")
    write_bytes(location, b"old")

    def write_half() -> None:
        with atomic_output(location) as path:
            Path(path).write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert read_bytes(location) == b"old"
    assert list_files(folder) == ["summary"]


def test_a_death_between_writing_and_renaming_leaves_nothing_that_is_seen(tmp_path: Path) -> None:
    """The crash is real: the writing process ends at the rename, without any clean-up."""
    script = (
        "import os, sys\n"
        "from specextend.data.storage import resolve, write_bytes\n"
        "os.replace = lambda source, target: os._exit(9)\n"
        "write_bytes(resolve(sys.argv[1]).child('part.parquet'), b'whole')\n"
    )
    died = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], env=os.environ | {"PYTHONPATH": ROOT}, check=False
    )
    assert died.returncode == 9
    assert len(os.listdir(tmp_path)) == 1, "the temporary file is there"
    assert list_files(resolve(str(tmp_path))) == []
    remove_temporary_files(resolve(str(tmp_path)))
    assert os.listdir(tmp_path) == []


def test_paths_and_uris_name_the_same_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    expected = f"{tmp_path}/a b"
    assert (
        resolve("a b").path
        == resolve(f"file://{tmp_path}/a%20b").path
        == resolve(str(tmp_path / "a b")).path
        == expected
    )


def test_an_unknown_file_system_is_refused_in_one_line() -> None:
    with pytest.raises(ValueError, match=r"^cannot open nowhere://x: .*pyarrow.fs$"):
        resolve("nowhere://x")


def test_small_files_go_to_s3_in_one_request() -> None:
    """The default is a multipart upload, which a death leaves open; and a key may hold spaces."""
    location = resolve("s3://bucket/a key?region=us-east-1")
    assert location.path == "bucket/a key"
    assert location.filesystem.equals(resolve("s3://bucket/other?region=us-east-1&allow_delayed_open=true").filesystem)


def test_a_location_pickles() -> None:
    location = resolve("/tmp/x")
    assert pickle.loads(pickle.dumps(location)) == location
