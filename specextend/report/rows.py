"""The rows of a run folder, whether it has been finalized or still runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from specextend.data.parts import list_parts, read_part
from specextend.data.storage import Location, list_files

_KEY = ["file", "row", "error_class"]
_BATCH_ROWS = 16_384


class RunRows:
    """Rows done and errors of a run folder, one for each document that has ended, as tables.

    Read from the commits in `_run/parts`, which are complete at any time, and where there are none (a copy without
    them) from `summaries/` and `errors/`. Raises ValueError for a folder that has neither.
    """

    def __init__(self, output: Location) -> None:
        self._output = output
        self._parts = list_parts(output)
        self.source: Literal["parts", "summaries"] = "parts" if self._parts else "summaries"
        if not self._parts and not self._files("summaries") and not self._files("errors"):
            raise ValueError(f"{output.path} holds no run: neither _run/parts nor summaries")
        self._kept = self._choose() if self._parts else []

    def done(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns of the documents done."""
        return self._read_parts(columns, errors=False) if self._parts else self._read_folder("summaries", columns)

    def errors(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns of the documents given up."""
        return self._read_parts(columns, errors=True) if self._parts else self._read_folder("errors", columns)

    def _choose(self) -> list[np.ndarray]:
        """Of each part, a mask of the rows that count: one per document, done beats error, later beats earlier."""
        tables = [read_part(self._output, name, _KEY) for name in self._parts]
        file, row = (np.concatenate([table[name].to_numpy() for table in tables]) for name in ("file", "row"))
        done = np.concatenate([table["error_class"].is_null().to_numpy() for table in tables])
        order = np.lexsort((np.arange(len(row)), done, row, file))
        changes = (np.diff(file[order]) != 0) | (np.diff(row[order]) != 0)
        kept = np.zeros(len(row), dtype=bool)
        kept[order[np.append(changes, True)[: len(order)]]] = True
        return np.split(kept, np.cumsum([len(table) for table in tables])[:-1])

    def _read_parts(self, columns: Sequence[str], *, errors: bool) -> Iterator[pa.Table]:
        for name, kept in zip(self._parts, self._kept, strict=True):
            table = read_part(self._output, name, [*dict.fromkeys([*columns, "error_class"])])
            is_error = table["error_class"].is_valid().to_numpy()
            yield table.filter(pa.array(kept & (is_error == errors))).select(columns)

    def _read_folder(self, folder: str, columns: Sequence[str]) -> Iterator[pa.Table]:
        for file in self._files(folder):
            with pq.ParquetFile(file.path, filesystem=file.filesystem) as parquet:
                for batch in parquet.iter_batches(_BATCH_ROWS, columns=list(columns)):
                    yield pa.Table.from_batches([batch])

    def _files(self, folder: str) -> list[Location]:
        place = self._output.child(folder)
        return [place.child(name) for name in list_files(place) if name.endswith(".parquet")]
