"""Rows that ask for the same summary as an earlier row: they are not decoded, but get a copy of its result.

Two rows are equal if they have the same text, limit, instruction, and reference with which to compare the summary.
"""

from __future__ import annotations

import hashlib
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from specextend.core import DocumentKey
from specextend.data.in_order import in_order
from specextend.data.scanning import ScannedRow
from specextend.data.source import Source

MAX_COPIES = 5000
"""Most copies of one result: they are committed with it, in one part, all of whose rows are in memory."""
EQUAL_TEXTS_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("doc_id", pa.large_string()),
        ("first_file", pa.int32()),
        ("first_row", pa.int64()),
    ]
)
"""A row of the input that is equal to an earlier one, and the key of the first one that it equals."""
_DIGEST_BYTES = 16
_ROW_BITS = 32


class EqualRows(Mapping[DocumentKey, Sequence[tuple[DocumentKey, str]]]):
    """Key and id of the open rows that are copies, by the row that is decoded. Each takes 16 bytes and its id."""

    def __init__(self, decoded: NDArray[np.int64], copies: NDArray[np.int64], doc_ids: pa.LargeStringArray) -> None:
        """Take codes [C] of the row that is decoded and of its copy, sorted, and the ids of the copies [C]."""
        self._decoded = array("q", decoded.tobytes())  # searched for every document, in a fifth of numpy's time
        self._copies, self._doc_ids = copies, doc_ids

    @classmethod
    def none(cls) -> EqualRows:
        """Return those of a start in which each row is decoded."""
        nothing = np.empty(0, np.int64)
        return cls(nothing, nothing, pa.array([], pa.large_string()))

    @property
    def num_rows(self) -> int:
        """Count the copies."""
        return len(self._copies)

    def are_copies(self, files: NDArray[np.int64], rows: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Say of each row [N] whether it is a copy."""
        return np.isin((files << _ROW_BITS) + rows, self._copies)

    def __len__(self) -> int:
        return len(np.unique(self._decoded))

    def __iter__(self) -> Iterator[DocumentKey]:
        return map(_key, np.unique(self._decoded).tolist())

    def __getitem__(self, key: DocumentKey) -> Sequence[tuple[DocumentKey, str]]:
        if not (found := self.of(key)):
            raise KeyError(key)
        return found

    def of(self, key: DocumentKey) -> Sequence[tuple[DocumentKey, str]]:
        """Return what is equal to a row, in order; to most rows nothing is."""
        if not self._decoded:
            return ()
        code = (key.file << _ROW_BITS) + key.row
        begin = bisect_left(self._decoded, code)
        end = bisect_right(self._decoded, code, begin)
        ids = self._doc_ids[begin:end].to_pylist()
        return [(_key(copy), doc_id) for copy, doc_id in zip(self._copies[begin:end].tolist(), ids, strict=True)]


class EqualTexts:
    """Finds the rows of a run that are equal to an earlier one, as all of its rows are scanned in order.

    Holds 16 bytes for each row until the scan is over. Texts that are not read, because `input.num_tokens_column` gives
    their lengths, are equal to none.
    """

    def __init__(self, source: Source, recorded: pa.Table | None = None) -> None:
        """Begin a scan of the source. recorded: the `table` of an earlier scan, which makes this one find nothing."""
        self._source, self._table = source, recorded
        self._digests = bytearray()

    def add(self, row: ScannedRow) -> None:
        """Add the next row. One that will be refused is equal to none."""
        if self._table is None:
            text = None if row.error_class is not None else row.text
            self._digests += bytes(_DIGEST_BYTES) if text is None else _digest(text, row)

    def table(self, checkpoint: Callable[[], object] = lambda: None) -> pa.Table:
        """Return the rows [C] that are equal to an earlier one, in input order, as EQUAL_TEXTS_SCHEMA.

        The first call reads the ids of their files. checkpoint: called after each file; may raise. Raises what
        `Source.ids` raises.
        """
        if self._table is None:
            repeated = _repeated(np.frombuffer(self._digests, np.uint64).reshape(-1, 2))
            self._digests = bytearray()
            is_any = len(repeated[0]) > 0
            self._table = _table(self._source, *repeated, checkpoint) if is_any else EQUAL_TEXTS_SCHEMA.empty_table()
        return self._table

    def among(self, keys: Collection[DocumentKey], checkpoint: Callable[[], object] = lambda: None) -> EqualRows:
        """Choose for each set of equal rows of `keys` which is decoded: the first, and one more for each MAX_COPIES.

        checkpoint: as for `table`.
        """
        table = self.table(checkpoint)
        codes, firsts = (_codes(table, *names) for names in (("file", "row"), ("first_file", "first_row")))
        leading = np.unique(firsts)
        rows, groups = np.concatenate([leading, codes]), np.concatenate([leading, firsts])
        ids = np.concatenate([np.full(len(leading), -1), np.arange(len(codes))])
        is_open = np.array([_key(row) in keys for row in rows.tolist()], np.bool_)
        order = np.flatnonzero(is_open)[np.lexsort((rows[is_open], groups[is_open]))]
        rows, groups, ids = rows[order], groups[order], ids[order]
        numbers = np.arange(len(rows))
        in_group = numbers - groups.searchsorted(groups)
        is_decoded = in_group % (MAX_COPIES + 1) == 0
        decoded = rows[np.maximum.accumulate(np.where(is_decoded, numbers, 0))]
        rows, decoded, ids = rows[~is_decoded], decoded[~is_decoded], ids[~is_decoded]
        order = np.lexsort((rows, decoded))
        doc_ids = table["doc_id"].combine_chunks().take(pa.array(ids[order]))
        return EqualRows(decoded[order], rows[order], doc_ids)


def _digest(text: bytes, row: ScannedRow) -> bytes:
    is_blank = row.instruction is None or not row.instruction.decode(errors="replace").strip()
    own = (row.max_new_tokens, None if is_blank else row.instruction, row.reference)
    return hashlib.sha256(hashlib.sha256(text).digest() + repr(own).encode()).digest()[:_DIGEST_BYTES]


def _repeated(digests: NDArray[np.uint64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the places of the digests [N, 2] that occurred before, in order, and where each occurred first.

    Digests of zero are left out. Most inputs repeat nothing, so only one half of each digest is sorted at first.
    """
    halves = np.sort(digests[:, 0])
    repeated = np.unique(halves[1:][halves[1:] == halves[:-1]])
    repeated = repeated[repeated > 0]
    if not len(repeated):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    found = repeated[np.minimum(repeated.searchsorted(digests[:, 0]), len(repeated) - 1)]
    places = np.flatnonzero(found == digests[:, 0])
    _, first, group = np.unique(digests[places], axis=0, return_index=True, return_inverse=True)
    firsts = places[first][group.reshape(-1)]
    return places[places != firsts], firsts[places != firsts]


def _table(
    source: Source, places: NDArray[np.int64], firsts: NDArray[np.int64], checkpoint: Callable[[], object]
) -> pa.Table:
    """Turn places among the rows of a source into keys, and add the ids."""
    files, rows, first_files, first_rows = *_keys(source, places), *_keys(source, firsts)

    def ids_of(mine: NDArray[np.int64]) -> pa.ChunkedArray:
        return source.ids(int(files[mine[0]])).take(pa.array(rows[mine]))

    chunks: list[pa.Array] = []
    for ids in in_order(ids_of, _by_file(files)):
        checkpoint()
        chunks += ids.chunks
    columns = [files, rows, pa.chunked_array(chunks, pa.large_string()), first_files, first_rows]
    return pa.table(columns, schema=EQUAL_TEXTS_SCHEMA)


def _keys(source: Source, places: NDArray[np.int64]) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
    """Return file and row of places [C] among the rows of a source, in any order."""
    ends = np.cumsum([len(source.rows(file.number)) for file in source.files])
    files = ends.searchsorted(places, side="right").astype(np.int32)
    rows = np.empty(len(places), np.int64)
    for mine in _by_file(files):
        number = int(files[mine[0]])
        chosen = np.asarray(source.rows(number))
        rows[mine] = chosen[places[mine] - (ends[number] - len(chosen))]
    return files, rows


def _by_file(files: NDArray[np.int32]) -> list[NDArray[np.int64]]:
    """Return the indices of the entries of each file, by its number."""
    order = np.argsort(files, kind="stable")
    return np.split(order, np.flatnonzero(np.diff(files[order])) + 1)


def _codes(table: pa.Table, file: str, row: str) -> NDArray[np.int64]:
    """Return the keys in two columns as numbers [C] with their order."""
    return (table[file].to_numpy().astype(np.int64) << _ROW_BITS) + table[row].to_numpy()


def _key(code: int) -> DocumentKey:
    return DocumentKey(code >> _ROW_BITS, code & ((1 << _ROW_BITS) - 1))
