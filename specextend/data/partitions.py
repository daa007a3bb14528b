"""Hive partitions: columns whose values stand in the names of folders, as in `year=2026/month=11/`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from urllib.parse import unquote

import pyarrow as pa

_NULL = "__HIVE_DEFAULT_PARTITION__"
_INTEGER = re.compile(r"-?[0-9]{1,9}")


def partition_values(relative_path: str) -> dict[str, str | None]:
    """Return the columns in a file's path with their values as text: `year=2026/a.parquet` has `{"year": "2026"}`."""
    pairs = (folder.partition("=") for folder in relative_path.split("/")[:-1] if "=" in folder)
    return {unquote(name): None if value == _NULL else unquote(value) for name, _, value in pairs if name}


def partition_types(relative_paths: Iterable[str]) -> dict[str, pa.DataType]:
    """Return the type of each column in the paths: int32 if all its values are integers, otherwise string.

    That is how pyarrow reads such folders, too.
    """
    values: dict[str, set[str]] = {}
    for path in relative_paths:
        for name, value in partition_values(path).items():
            values.setdefault(name, set()).update([] if value is None else [value])
    return {name: pa.int32() if found and _are_integers(found) else pa.string() for name, found in values.items()}


def _are_integers(values: Iterable[str]) -> bool:
    return all(_INTEGER.fullmatch(value) for value in values)


def partition_column(relative_path: str, column: str, kind: pa.DataType, num_rows: int) -> pa.Array:
    """Return a file's value of a column in its path, once for each row. Raises ArrowException for another type."""
    value = pa.array([partition_values(relative_path)[column]], pa.string()).cast(kind)[0]
    return pa.repeat(value, num_rows)


def partition_folders(relative_path: str, columns: Iterable[str]) -> tuple[str, ...]:
    """Return the folders of a file's path that hold some columns, in the order of the columns."""
    folders: Mapping[str, str] = {
        unquote(folder.partition("=")[0]): folder for folder in relative_path.split("/")[:-1] if "=" in folder
    }
    return tuple(folders[column] for column in columns)
