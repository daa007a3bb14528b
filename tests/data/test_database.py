"""Rows of a database that do not fit into its memory."""

import tempfile

import pytest

from specextend.data.database import Database

FILL = "CREATE TABLE rows AS SELECT range AS n, hash(n) AS a, hash(n + 1) AS b, hash(n + 2) AS c FROM range(12_000_000)"
"""400 MB."""


def test_they_are_on_disk_and_gone_with_it(tmp_path, monkeypatch):
    """A driver ends with millions of rows, and has two gigabytes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = Database()
    database.select(FILL)
    assert {folder.stat().st_mode & 0o777 for folder in tmp_path.iterdir()} == {0o700}, "ids are nobody else's business"
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) > 20 << 20
    assert database.select("SELECT count(a) AS n, max(n) AS last FROM rows") == [{"n": 12_000_000, "last": 11_999_999}]
    del database
    assert not list(tmp_path.iterdir())


def test_a_folder_that_takes_no_files_is_named(tmp_path, monkeypatch):
    """It is not the output folder that is full, and freeing that would not help."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = Database()
    [folder] = tmp_path.iterdir()
    folder.rmdir()
    folder.touch()
    with pytest.raises(OSError, match=r"has no room .*TMPDIR"):
        database.select(FILL)
