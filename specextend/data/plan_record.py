"""What the plan needs of each input row, kept in `_run/`: a resumed run reads no text to plan again.

`plan.parquet` has the length of each row, `equal_texts.parquet` the rows that are equal to an earlier one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import DocumentKey
from specextend.data.equal_texts import EQUAL_TEXTS_SCHEMA, EqualTexts
from specextend.data.parquet import DAMAGED
from specextend.data.run_folder import equal_texts_file, plan_file
from specextend.data.scanning import ScannedRow
from specextend.data.source import Source
from specextend.data.storage import Location, read_bytes, write_bytes

_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("num_bytes", pa.int64()),
        ("num_tokens", pa.int64()),
        ("max_new_tokens", pa.int64()),
        ("error_class", pa.dictionary(pa.int32(), pa.string())),
    ]
)
"""Columns: those of `ScannedRow` without the text, with its key as two columns."""
_PLAN = b"specextend.plan"
"""Key in the file's metadata; its value is JSON."""
_BATCH_ROWS = 1 << 16


class PlanRecord:
    """The rows of the input as `Source.scan` yields them, from an earlier start's record if there is one.

    It is a record of this input only: the fingerprint of the run and the column of token counts are in it. One that is
    damaged or of another input is of no use, and is replaced.
    """

    def __init__(self, source: Source, output: Location, fingerprint: str) -> None:
        """Open the record, if there is one. Raises OSError if the store of the output does not answer."""
        self._source, self._file, self._equal_file = source, plan_file(output), equal_texts_file(output)
        self._identity = {"fingerprint": fingerprint, "num_tokens_column": source.options.num_tokens_column}
        self._recorded, self.tokens_per_byte, self._equal = self._open()
        self._sink: pa.BufferOutputStream | None = None
        self._writer: pq.ParquetWriter | None = None

    def scan(self) -> Iterator[ScannedRow]:
        """Yield the rows in key order: without texts if they are recorded, and otherwise as `Source.scan` does."""
        yield from self._scanned() if self._recorded is None else _rows(self._recorded)

    def equal_texts(self) -> EqualTexts:
        """Return what finds equal rows while the rows are scanned, or knows them from the record."""
        return EqualTexts(self._source, self._equal)

    def keep(self, tokens_per_byte: float | None, equal: EqualTexts | None = None) -> None:
        """Write the record, whole or not at all, once all rows were scanned.

        tokens_per_byte: of their texts. equal: has seen the rows; without it the record says that none are equal.
        """
        if self._writer is None or self._sink is None:
            return
        num_equal = 0 if equal is None else self._keep_equal(equal.table())
        plan = self._identity | {"tokens_per_byte": tokens_per_byte, "rows": self._source.num_rows, "equal": num_equal}
        self._writer.add_key_value_metadata({_PLAN: json.dumps(plan)})
        self._writer.close()
        write_bytes(self._file, self._sink.getvalue())

    def _keep_equal(self, table: pa.Table) -> int:
        """Write the equal rows, before the plan that counts them; return how many there are."""
        if len(table):
            sink = pa.BufferOutputStream()
            pq.write_table(table, sink, compression="zstd")
            write_bytes(self._equal_file, sink.getvalue())
        return len(table)

    def _scanned(self) -> Iterator[ScannedRow]:
        self._sink = pa.BufferOutputStream()
        self._writer = pq.ParquetWriter(self._sink, _SCHEMA, compression="zstd")
        waiting: list[dict[str, Any]] = []
        for row in self._source.scan():
            waiting.append(_recorded(row))
            if len(waiting) == _BATCH_ROWS:
                self._writer.write_table(pa.Table.from_pylist(waiting, _SCHEMA))
                waiting = []
            yield row
        self._writer.write_table(pa.Table.from_pylist(waiting, _SCHEMA))

    def _open(self) -> tuple[pq.ParquetFile | None, float | None, pa.Table | None]:
        """Return the record, its tokens per byte and the equal rows; None for each if there is none of this input."""
        data = read_bytes(self._file)
        if data is None:
            return None, None, None
        try:
            parquet = pq.ParquetFile(pa.BufferReader(data))
            plan = json.loads((parquet.metadata.metadata or {})[_PLAN])
            equal = self._open_equal(plan.get("equal", 0))
        except (*DAMAGED, KeyError, ValueError):
            return None, None, None
        is_ours = {name: plan.get(name) for name in self._identity} == self._identity
        is_whole = plan.get("rows") == parquet.metadata.num_rows == self._source.num_rows
        return (parquet, plan.get("tokens_per_byte"), equal) if is_ours and is_whole else (None, None, None)

    def _open_equal(self, num_rows: int) -> pa.Table:
        """Read the equal rows. Raises ValueError if there are not so many, or what reading raises."""
        if not num_rows:
            return EQUAL_TEXTS_SCHEMA.empty_table()
        table = pq.read_table(pa.BufferReader(read_bytes(self._equal_file) or b"")).cast(EQUAL_TEXTS_SCHEMA)
        if len(table) != num_rows:
            raise ValueError(f"{len(table)} equal rows, not {num_rows}")
        return table


def _recorded(row: ScannedRow) -> dict[str, Any]:
    return {
        "file": row.key.file,
        "row": row.key.row,
        "num_bytes": row.num_bytes,
        "num_tokens": row.num_tokens,
        "max_new_tokens": row.max_new_tokens,
        "error_class": row.error_class,
    }


def _rows(parquet: pq.ParquetFile) -> Iterator[ScannedRow]:
    for batch in parquet.iter_batches(_BATCH_ROWS):
        files, rows, *facts = (column.to_pylist() for column in batch.columns)
        for file, row, num_bytes, num_tokens, limit, error_class in zip(files, rows, *facts, strict=True):
            yield ScannedRow(DocumentKey(file, row), None, num_bytes, num_tokens, limit, error_class)
