"""Hashes of large files: read once, and read again whenever they may have changed."""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path

import pytest

from specextend.file_hashes import KEPT_FROM_BYTES, cache_folder, file_sha256

MARK = "0" * 64


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A file worth keeping the hash of, and an empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"a" * KEPT_FROM_BYTES)
    return path


def a_minute_later() -> int:
    """The time when a file of these tests is old; none waits for it."""
    return time.time_ns() + 60 * 10**9


def kept_sha256(path: Path) -> str:
    return file_sha256(path, a_minute_later)


def true_hash(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def mark_kept() -> None:
    """Put a hash into the cache that no file has: who returns it has not read the file."""
    folder = cache_folder()
    assert folder is not None
    [kept] = folder.iterdir()
    kept.write_text(json.dumps(json.loads(kept.read_text()) | {"sha256": MARK}))


def test_a_large_file_is_read_once_however_often_it_is_asked_for(large: Path) -> None:
    """Eight workers of a node and every restart would each read sixteen gigabytes."""
    assert kept_sha256(large) == true_hash(large)
    mark_kept()
    assert kept_sha256(large) == MARK
    (large.parent / "link").symlink_to(large)
    assert kept_sha256(large.parent / "link") == MARK, "a link of the Hub's cache is the file it leads to"


def test_a_file_that_changed_is_read_again_even_with_its_size_and_time_put_back(large: Path) -> None:
    """`rsync --times` and `cp -p` keep both: what they cannot keep tells."""
    kept_sha256(large)
    mark_kept()
    stat = large.stat()
    with large.open("r+b") as file:
        file.write(b"b")
    os.utime(large, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert kept_sha256(large) == true_hash(large)


def test_a_file_that_has_just_been_written_is_not_vouched_for(large: Path) -> None:
    """A second write within a tick of the clock would look like the first."""
    written_ns = large.stat().st_ctime_ns
    assert file_sha256(large, lambda: written_ns + 10**9) == true_hash(large)
    folder = cache_folder()
    assert folder is not None
    assert not folder.exists()


@pytest.mark.parametrize("kept", ["", "[]", "{}", '{"file": 1, "sha256": "x"}'])
def test_a_kept_hash_that_cannot_be_read_is_computed_again(large: Path, kept: str) -> None:
    """A cache may be deleted or damaged at any time."""
    kept_sha256(large)
    folder = cache_folder()
    assert folder is not None
    [path] = folder.iterdir()
    path.write_text(kept)
    assert kept_sha256(large) == true_hash(large)


@pytest.mark.parametrize("place", ["file", "relative"])
def test_where_nothing_can_be_kept_hashes_are_right_all_the_same(
    large: Path, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container without a home, or with one that cannot be written."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(large) if place == "file" else "relative")
    monkeypatch.setenv("HOME", "relative")
    assert kept_sha256(large) == true_hash(large)
    assert kept_sha256(large) == true_hash(large)
