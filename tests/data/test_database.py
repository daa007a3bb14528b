"""Rows of a database that do not fit into its memory."""

import tempfile

import numpy as np
import pyarrow as pa
import pytest

from specextend.data.database import Database

ROWS = pa.table({f"column{number}": np.random.default_rng(number).random(100_000) for number in range(10)})


def fill(database):
    """Add 320 MB."""
    database.add(ROWS, "CREATE TABLE rows AS FROM given")
    for _ in range(39):
        database.add(ROWS, "INSERT INTO rows FROM given")


def test_they_are_on_disk_and_gone_with_it(tmp_path, monkeypatch):
    """A driver ends with millions of rows, and has two gigabytes."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    database = Database()
    fill(database)
    assert sum(file.stat().st_size for file in tmp_path.rglob("*")) > 20 << 20
    assert database.select("SELECT count(*) AS n, max(column3) AS most FROM rows") == [
        {"n": 4_000_000, "most": ROWS["column3"].to_numpy().max()}
    ]
    del database
    assert not list(tmp_path.iterdir())


def test_a_full_temporary_folder_is_named(tmp_path, monkeypatch):
    """It is not the output folder that is full, and freeing that would not help."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(OSError, match=r"gone takes no more .*TMPDIR"):
        fill(Database())
