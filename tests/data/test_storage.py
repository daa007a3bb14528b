"""A file is there whole or not at all, on every file system."""

from pathlib import Path

import pytest
from pyarrow import fs

from specextend.data.storage import (
    Location,
    atomic_output,
    delete,
    list_files,
    path_below,
    read_bytes,
    remove_temporary_files,
    resolve,
    write_bytes,
)


@pytest.fixture(params=["local", "other"])
def folder(request, tmp_path):
    """A local folder, and the same through a file system that has no local paths."""
    if request.param == "local":
        return resolve(f"{tmp_path}/folder")
    return Location(fs.SubTreeFileSystem(str(tmp_path), fs.LocalFileSystem()), "folder")


def test_a_failure_while_writing_leaves_what_was_there(folder):
    location = folder.child("summary")
    write_bytes(location, b"old")

    def write_half():
        with atomic_output(location) as path:
            Path(path).write_bytes(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        write_half()
    assert read_bytes(location) == b"old"
    assert list_files(folder) == ["summary"]


def test_a_file_uri_is_percent_encoded_and_a_path_is_not(tmp_path):
    """A file URI comes from a program, a path from a person; neither has parameters or fragments."""
    name = "date=2026-01-01%2000%3A00#1?x=y"
    assert resolve(f"{tmp_path}/{name}").path == f"{tmp_path}/{name}"
    assert resolve((tmp_path / name).as_uri()).path == f"{tmp_path}/{name}"
    assert resolve(path_below(f"file://{tmp_path}/a?", "b")).path == f"{tmp_path}/a?/b"
    assert resolve(f"file://localhost{tmp_path}/a#1").path == f"{tmp_path}/a#1"
    with pytest.raises(ValueError, match=r"^cannot open file://a/b: a file:// URI needs an absolute path"):
        resolve("file://a/b")


@pytest.mark.parametrize("scheme, parameters", [("s3", "?region=us-east-1"), ("gs", "")])
@pytest.mark.parametrize("key", ["date=2026-01-01%2000%3A00/x", "out#1", "why?.parquet", "[a]*é", "a//b"])
def test_the_path_of_a_uri_is_taken_as_it_is_written(scheme, parameters, key):
    """`out#1` and `out#2` were one folder, and what Spark escapes could not be named."""
    uri = f"{scheme}://bucket/{key}{parameters}"
    assert resolve(uri).path == f"bucket/{key}"
    assert resolve(path_below(uri, "a/b")).path == f"bucket/{key}/a/b"


def gate(num_open):
    """A check that fails after so many times."""
    times = iter(range(num_open))

    def check():
        if next(times, None) is None:
            raise PermissionError("the folder is somebody else's by now")

    return check


def write_through(location):
    with atomic_output(location) as path:
        Path(path).write_bytes(b"new")


CHANGES = {
    "write_bytes": lambda location: write_bytes(location, b"new"),
    "atomic_output": write_through,
    "delete": delete,
}


@pytest.mark.parametrize("num_open", [0, 1])
@pytest.mark.parametrize("change", CHANGES)
def test_nothing_changes_behind_a_gate_that_is_shut(folder, change, num_open):
    """Whoever lost its folder while it wrote a file must not give it its name; all writers pass the one gate."""
    write_bytes(folder.child("a", "file"), b"old")
    guarded = folder.behind(gate(num_open if change != "delete" else 0))
    with pytest.raises(PermissionError):
        CHANGES[change](guarded.child("a", "file"))
    assert read_bytes(folder.child("a", "file")) == b"old"
    assert list_files(folder.child("a")) == ["file"]
    remove_temporary_files(folder.child("a"))
    left = folder.filesystem.get_file_info(fs.FileSelector(folder.child("a").path))
    assert [info.base_name for info in left] == ["file"]


NO_NETWORK = "When resolving region for bucket 'bucket': AWS Error NETWORK_CONNECTION during HeadBucket operation"


@pytest.mark.parametrize(
    "answer, error, said",
    [
        (NO_NETWORK, OSError, f"s3://bucket/x cannot be reached: {NO_NETWORK}; run again"),
        ("Bucket 'bucket' not found", ValueError, "cannot open s3://bucket/x: Bucket 'bucket' not found"),
    ],
)
def test_a_store_that_is_away_is_told_from_a_bucket_that_is_not_there(monkeypatch, answer, error, said):
    """A plain `s3://` asks for its bucket's region when it is opened: without a network that was exit 2."""

    class FileSystem(fs.FileSystem):
        @staticmethod
        def from_uri(uri):
            raise OSError(answer)

    monkeypatch.setattr(fs, "FileSystem", FileSystem)
    with pytest.raises((OSError, ValueError)) as raised:
        resolve("s3://bucket/x")
    assert type(raised.value) is error
    assert str(raised.value) == said
