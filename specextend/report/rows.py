"""The valid rows of a run folder, read table by table in bounded memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import one_line
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.parts import find_results, read_part, run_id_of
from specextend.data.run_folder import errors_folder, summaries_folder
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, list_files

RUN_ID = "run_id"
"""Column that is added to every table: the start that committed a row; null if only summaries are left."""
BATCH_ROWS = 16_384
"""Rows of a table, about; a commit has few, and every table costs the same."""
_NEEDED = ("doc_id", "num_prompt_tokens", "num_output_tokens", "error_class")
"""Columns that the files of all versions have. Any other may be missing, and is null then."""


class Rows:
    """The valid rows of a run folder, one for each document that has ended, as tables.

    They are read from the commits in `_run/parts`, which are complete at any time. A copy of the folder without them is
    read from `summaries/` and `errors/`. Raises ValueError if the folder has neither.
    """

    def __init__(self, output: Location) -> None:
        self._output, self._results = output, find_results(output)
        self.source: Literal["parts", "summaries"] = "parts" if self._results.names else "summaries"
        files = [*self._files(summaries_folder(output)), *self._files(errors_folder(output))]
        if not self._results.names and not files:
            raise ValueError(f"{output.path} holds no run: neither _run/parts nor summaries")

    def read(self, columns: Sequence[str], *, done: bool) -> Iterator[pa.Table]:
        """Read columns of the finished documents, or of the failed ones, and RUN_ID."""
        yield from _gathered(
            self._from_parts(columns, done) if self._results.names else self._from_files(columns, done)
        )

    def _from_parts(self, columns: Sequence[str], done: bool) -> Iterator[pa.Table]:
        results = self._results
        order = np.lexsort((results.offsets, results.parts))
        chosen = order[results.done[order] == done]
        ends = np.searchsorted(results.parts[chosen], np.arange(len(results.names)), side="right")
        for name, positions in zip(results.names, np.split(chosen, ends[:-1]), strict=True):
            if len(positions):
                table = read_part(self._output, name, columns).take(pa.array(results.offsets[positions]))
                yield table.append_column(RUN_ID, pa.repeat(run_id_of(name), len(table)))

    def _from_files(self, columns: Sequence[str], done: bool) -> Iterator[pa.Table]:
        for file in self._files((summaries_folder if done else errors_folder)(self._output)):
            try:
                with pq.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
                    yield from _batches(parquet, columns)
            except (*DAMAGED, KeyError) as error:
                if not is_damaged(file, error):
                    raise
                raise ValueError(
                    f"{file.path} is damaged ({one_line(error)}); run the job again to write it anew"
                ) from error

    def _files(self, folder: Location) -> list[Location]:
        return [folder.child(name) for name in list_files(folder) if name.endswith(".parquet")]


def _batches(parquet: pq.ParquetFile, columns: Sequence[str]) -> Iterator[pa.Table]:
    """Read columns with the types of PART_SCHEMA. Raises KeyError for a file without those that all versions wrote."""
    there = parquet.schema_arrow.names
    if missing := [name for name in columns if name in _NEEDED and name not in there]:
        raise KeyError(f"it has no column {missing[0]}")
    for batch in parquet.iter_batches(BATCH_ROWS, columns=[name for name in columns if name in there]):
        fields = [PART_SCHEMA.field(name) for name in columns]
        arrays = [
            batch[field.name].cast(field.type) if field.name in there else pa.nulls(len(batch), field.type)
            for field in fields
        ]
        nobody = pa.nulls(len(batch), pa.string())
        yield pa.table([*arrays, nobody], schema=pa.schema([*fields, (RUN_ID, pa.string())]))


def _gathered(tables: Iterable[pa.Table]) -> Iterator[pa.Table]:
    """Join small tables into tables of about BATCH_ROWS rows."""
    waiting: list[pa.Table] = []
    num_rows = 0
    for table in tables:
        waiting.append(table)
        num_rows += len(table)
        if num_rows >= BATCH_ROWS:
            yield pa.concat_tables(waiting).combine_chunks()
            waiting, num_rows = [], 0
    if waiting:
        yield pa.concat_tables(waiting).combine_chunks()
