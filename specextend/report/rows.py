"""The valid rows of a run folder, read table by table in bounded memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import one_line
from specextend.data.fingerprint import num_input_rows, read_manifest
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.parts import KEY_COLUMNS, ORIGIN, list_parts, read_results, run_id_of
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
        self._output = output
        self.source: Literal["parts", "summaries"] = "parts" if list_parts(output) else "summaries"
        files = [*self._files(summaries_folder(output)), *self._files(errors_folder(output))]
        if self.source == "summaries" and not files and not _had_nothing_to_do(output):
            raise ValueError(f"{output.path} holds no run: neither _run/parts nor summaries")

    def done(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Read columns of the finished documents, and RUN_ID."""
        if self.source == "summaries":
            yield from self._from_files(summaries_folder(self._output), columns)
            return
        for table in read_results(self._output, [*dict.fromkeys([*KEY_COLUMNS, *ORIGIN, *columns])]):
            if table["error_class"].null_count:
                yield with_run_ids(table, columns)

    def both(self, done: Sequence[str], errors: Sequence[str]) -> Iterator[tuple[bool, pa.Table]]:
        """Read columns of the finished documents and of the failed ones, each with RUN_ID, in one pass.

        Each table comes with True if its documents are done.
        """
        if self.source == "summaries":
            yield from ((True, table) for table in self._from_files(summaries_folder(self._output), done))
            yield from ((False, table) for table in self._from_files(errors_folder(self._output), errors))
            return
        for table in read_results(self._output, [*dict.fromkeys([*KEY_COLUMNS, *ORIGIN, *done, *errors])]):
            yield told_apart(table, done, errors)

    def _from_files(self, folder: Location, columns: Sequence[str]) -> Iterator[pa.Table]:
        for file in self._files(folder):
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
        return [folder.child(name) for name in list_files(folder, recursive=True) if name.endswith(".parquet")]


def told_apart(results: pa.Table, done: Sequence[str], errors: Sequence[str]) -> tuple[bool, pa.Table]:
    """Return whether a table of `read_results` holds rows done, and its columns for those or for error rows.

    RUN_ID is added.
    """
    is_done = results["error_class"].null_count > 0
    return is_done, with_run_ids(results, done if is_done else errors)


def with_run_ids(results: pa.Table, columns: Sequence[str]) -> pa.Table:
    """Select columns of a table that has ORIGIN, and add RUN_ID."""
    run_ids = [
        pa.array(map(run_id_of, chunk.dictionary.to_pylist()), pa.string()).take(chunk.indices)
        for chunk in results["origin"].chunks
    ]
    return results.select(list(columns)).append_column(RUN_ID, pa.chunked_array(run_ids, pa.string()))


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


def _had_nothing_to_do(output: Location) -> bool:
    """Return True for a run about no row, because earlier runs have done all of them."""
    manifest = read_manifest(output)
    return manifest is not None and num_input_rows(manifest) == 0
