"""Data set of documents: Parquet files, whose rows name their file, size and modification time."""

import json
import secrets
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Values
from specextend.data.database import Database
from specextend.data.inputs import InputError
from specextend.data.listing import PAGE_LABELS, PAGE_STARTS, PART_NAME, Failure
from specextend.data.parquet import CHECKED, SEALED, fitted, open_parquet
from specextend.data.storage import Location, atomic_output, delete, file_sizes
from specextend.folders import temporary_folder

COUNTS = (
    "pages_without_text",
    "unmapped_characters",
    "hidden_characters",
    "hidden_instruction",
    "left_out_characters",
)
"""Columns that count lost text; docs/documents.md explains them."""
COLUMNS = {
    "id": pa.string(),
    "title": pa.string(),
    "text": pa.string(),
    "source_path": pa.string(),
    "source_row": pa.int64(),
    "source_size": pa.int64(),
    "source_modified": pa.timestamp("us", "UTC"),
    **dict.fromkeys(COUNTS, pa.int64()),
    PAGE_STARTS: pa.list_(pa.int64()),
    PAGE_LABELS: pa.list_(pa.string()),
}
_SMALL_BYTES = 32 << 20
_EXACT = 1 << 53
"""Floats hold all smaller integers."""
_REPEATED = """
    CREATE TABLE repeated AS
    SELECT *, first_value(source_path) OVER same AS owner,
    first_value(source_row) OVER same AS owner_row
    FROM rows WHERE id IN (SELECT id FROM rows GROUP BY id HAVING count(*) > 1)
    WINDOW same AS (PARTITION BY id ORDER BY source_path, source_row, part, row)
    QUALIFY row_number() OVER same > 1
"""
"""Rows with an earlier id, in the order of files."""
_KEPT = "SELECT part, row FROM rows ANTI JOIN repeated USING (part, row)"
_STRANGERS = """
    SELECT source_path AS path, source_row AS row, 'repeated id' AS reason,
    'has the id "' || id || '" of ' || owner || coalesce(', line ' || owner_row, '') AS message
    FROM repeated WHERE source_path != owner OR source_row IS DISTINCT FROM owner_row
    ORDER BY source_path, source_row, part, repeated.row
"""
_GROUP_ROWS = 1024
_GROUP_BYTES = 1 << 20


def write_rows(rows: Iterable[Values], target: Location) -> int:
    """Write rows as one Parquet file, whole or not at all; return their number.

    Columns hold Booleans, numbers or text; all other and mixed values become JSON. Without rows
    there is no file.
    """
    num_rows = 0
    with temporary_folder() as scratch:  # the last row may change a type
        groups = []
        for number, group in enumerate(_groups(rows)):
            names = dict.fromkeys([*COLUMNS, *(name for row in group for name in row)])
            table = pa.table(
                {
                    name: _column([row.get(name) for row in group], COLUMNS.get(name))
                    for name in names
                }
            )
            groups.append(f"{scratch}/{number}.parquet")
            pq.write_table(table, groups[-1], **SEALED)
            num_rows += len(table)
        if groups:
            schema = _joint_schema([pq.read_metadata(group) for group in groups])
            _write((pq.read_table(group, **CHECKED) for group in groups), schema, target)
    return num_rows


def _groups(rows: Iterable[Values]) -> Iterator[list[Values]]:
    group: list[Values] = []
    num_bytes = 0
    for row in rows:
        group.append(row)
        num_bytes += len(row["text"])
        if len(group) == _GROUP_ROWS or num_bytes >= _GROUP_BYTES:
            yield group
            group = []
            num_bytes = 0
    if group:
        yield group


def _column(values: list[Any], kind: pa.DataType | None) -> pa.Array:
    kinds = {type(value) for value in values if value is not None}
    if kind or (not kinds & {list, dict} and (len(kinds) < 2 or kinds == {int, float})):
        try:
            return pa.array(values, kind)
        except (pa.ArrowException, OverflowError, TypeError, ValueError):
            pass
    texts = [
        value if value is None or isinstance(value, str) else json.dumps(value, default=str)
        for value in values
    ]
    return pa.array(texts, "string")


def _joint_schema(footers: list[pq.FileMetaData]) -> pa.Schema:
    """Return all columns, with types that hold all values exactly."""
    types = defaultdict(set)
    for footer in footers:
        for i, field in enumerate(footer.schema.to_arrow_schema()):
            types[field.name].add(field.type)
            if field.type == pa.int64() and _has_large(footer, i):
                types[field.name].add("large")
    return pa.schema([(name, _joint_type(kinds)) for name, kinds in types.items()])


def _has_large(footer: pq.FileMetaData, column: int) -> bool:
    groups = [footer.row_group(i).column(column).statistics for i in range(footer.num_row_groups)]
    return any(max(-group.min, group.max) > _EXACT for group in groups if group.has_min_max)


def _joint_type(kinds: set[Any]) -> pa.DataType:
    known = kinds - {pa.null()}
    if known == {pa.int64(), pa.float64()}:
        return pa.float64()
    known -= {"large"}
    return pa.string() if len(known) > 1 else (known or kinds).pop()


def _write(tables: Iterable[pa.Table], schema: pa.Schema, target: Location) -> None:
    with atomic_output(target) as path, pq.ParquetWriter(path, schema, **SEALED) as writer:
        for table in tables:
            writer.write_table(fitted(table, schema))


def list_parts(folder: Location) -> dict[str, int]:
    """Return the sizes of files by name. Raises InputError for other files."""
    sizes = {name: size for name, size in file_sizes(folder).items() if not name.startswith("_")}
    for name in sizes:
        if not PART_NAME.fullmatch(name):
            raise InputError(
                f"{folder.path} holds {name}, which is no part of a data set; name a folder of "
                "its own"
            )
    return dict(sorted(sizes.items()))


def new_part(folder: Location) -> Location:
    """Return a location after all parts."""
    last = max((int(name.split("-")[1]) for name in list_parts(folder)), default=0)
    return folder.child(f"part-{last + 1:06}-{secrets.token_hex(4)}.parquet")


def known_files(folder: Location) -> dict[str, tuple[int, Any]]:
    """Return size and time of modification of each file by path. Raises InputError."""
    names = ["source_path", "source_size", "source_modified"]
    return {
        row["source_path"]: (row["source_size"], row["source_modified"])
        for part in list_parts(folder)
        for row in _read(folder.child(part), names).group_by(names).aggregate([]).to_pylist()
    }


def _read(part: Location, names: list[str]) -> pa.Table:
    try:
        with open_parquet(part) as parquet:
            return parquet.read(names).select(names)
    except (OSError, pa.ArrowException, KeyError) as error:
        raise InputError(
            f"{part.path} is no part of such a data set: {error}; name a folder of its own"
        ) from error


def settle(folder: Location, without: Collection[str] = ()) -> tuple[int, list[Failure]]:
    """Remove repeated ids and rows of the files `without`, unify the schema, and join small parts.

    New parts are written before old ones are deleted: after a crash, the next call removes repeated
    rows. Returns the number of rows, and a failure for each repeated id.
    """
    sizes = list_parts(folder)
    parts = [folder.child(name) for name in sizes]
    if not parts:
        return 0, []
    database = _with_rows(parts, without)
    number_of_part, row = database.arrays(_KEPT)
    numbers = [row[number_of_part == i] for i in range(len(parts))]
    footers = [open_parquet(part).metadata for part in parts]
    schema = _joint_schema(footers)
    stale = {
        i
        for i, footer in enumerate(footers)
        if len(numbers[i]) < footer.num_rows or not footer.schema.to_arrow_schema().equals(schema)
    }
    small = {i for i, size in enumerate(sizes.values()) if size < _SMALL_BYTES}
    groups = [{i} for i in stale - small] + ([small] if len(small) > 1 or small & stale else [])
    for group in groups:
        if any(len(numbers[i]) for i in group):
            tables = (table for i in sorted(group) for table in _rows_of(parts[i], numbers[i]))
            _write(tables, schema, new_part(folder))
        for i in group:
            delete(parts[i])
    return len(row), [Failure(**each) for each in database.select(_STRANGERS)]


def _with_rows(parts: list[Location], without: Collection[str]) -> Database:
    database = Database()
    database.select(
        "CREATE TABLE rows (id TEXT, source_path TEXT, source_row BIGINT, part INT, row BIGINT)"
    )
    for i, part in enumerate(parts):
        table = _read(part, ["id", "source_path", "source_row"])
        database.add(table, f"INSERT INTO rows SELECT *, {i}, row_number() OVER () - 1 FROM given")
    gone = pa.table({"source_path": pa.array(without, "string")})
    database.add(gone, "DELETE FROM rows WHERE source_path IN (FROM given)", _REPEATED)
    return database


def _rows_of(part: Location, numbers: np.ndarray) -> Iterator[pa.Table]:
    begin = 0
    with open_parquet(part) as parquet:
        for group in range(parquet.num_row_groups):
            table = parquet.read_row_group(group)
            is_kept = np.isin(np.arange(begin, begin + len(table)), numbers)
            begin += len(table)
            if is_kept.any():
                yield table.filter(is_kept)
