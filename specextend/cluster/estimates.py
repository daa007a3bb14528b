"""The documents of a start and their estimated tokens, in columns: a few bytes for each of ten million. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from specextend.core import DocumentKey


@dataclass(frozen=True, slots=True)
class TokenEstimate:
    """Estimated tokens of a document that has not run yet."""

    num_prompt_tokens: int
    max_new_tokens: int

    @property
    def total(self) -> int:
        """Return the most tokens that the document may take, prompt and output."""
        return self.num_prompt_tokens + self.max_new_tokens


class RowSet(Collection[DocumentKey]):
    """A set of input rows: one byte for each row of the input."""

    def __init__(self, file_rows: Sequence[int], keys: Iterable[DocumentKey]) -> None:
        """Take the keys. file_rows: rows of each input file."""
        self._masks = [np.zeros(num_rows, np.bool_) for num_rows in file_rows]
        for file, row in keys:
            self._masks[file][row] = True
        self._size = sum(int(mask.sum()) for mask in self._masks)

    def __len__(self) -> int:
        return self._size

    def __contains__(self, key: object) -> bool:
        """Return True for a key of the set; a commit of another input may have keys of rows that no file has."""
        assert isinstance(key, DocumentKey)
        is_row = 0 <= key.file < len(self._masks) and 0 <= key.row < len(self._masks[key.file])
        return is_row and bool(self._masks[key.file][key.row])

    def __iter__(self) -> Iterator[DocumentKey]:
        for file, mask in enumerate(self._masks):
            for row in np.flatnonzero(mask):
                yield DocumentKey(file, int(row))


class Estimates(Mapping[DocumentKey, TokenEstimate]):
    """The documents of a start in input order, each at its position.

    rows [N] int64; num_prompt_tokens, max_new_tokens [N] int32, of all requests for a document; `span` gives the
    positions of a file.
    """

    def __init__(
        self,
        files: NDArray[Any],
        rows: NDArray[Any],
        num_prompt_tokens: NDArray[Any],
        max_new_tokens: NDArray[Any],
    ) -> None:
        """Take columns [N] in input order."""
        assert np.all((np.diff(files) > 0) | ((np.diff(files) == 0) & (np.diff(rows) > 0))), "not in input order"
        self.rows = rows.astype(np.int64, copy=False)
        self.num_prompt_tokens = num_prompt_tokens.astype(np.int32, copy=False)
        self.max_new_tokens = max_new_tokens.astype(np.int32, copy=False)
        num_files = int(files[-1]) + 1 if len(files) else 0
        self._starts = np.searchsorted(files, np.arange(num_files + 1))

    @classmethod
    def of(cls, documents: Mapping[DocumentKey, TokenEstimate]) -> Estimates:
        """Make columns of estimates by key."""
        keys = sorted(documents)
        found = [documents[key] for key in keys]
        columns = (
            [key.file for key in keys],
            [key.row for key in keys],
            [estimate.num_prompt_tokens for estimate in found],
            [estimate.max_new_tokens for estimate in found],
        )
        return cls(*(np.array(column, np.int64) for column in columns))

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[DocumentKey]:
        for file in range(self.num_files):
            for row in self.rows[self.span(file)].tolist():
                yield DocumentKey(file, row)

    def __getitem__(self, key: DocumentKey) -> TokenEstimate:
        return self.at(self.position(key))

    @property
    def num_files(self) -> int:
        """Return a number that is above those of all files with documents."""
        return len(self._starts) - 1

    @property
    def totals(self) -> NDArray[np.int64]:
        """Return the tokens of each document, prompt and output. [N]."""
        return self.num_prompt_tokens.astype(np.int64) + self.max_new_tokens

    def totals_at(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the tokens of the documents at some positions."""
        return self.num_prompt_tokens[positions].astype(np.int64) + self.max_new_tokens[positions]

    def span(self, file: int) -> slice:
        """Return the positions of a file's documents."""
        return slice(int(self._starts[file]), int(self._starts[file + 1]))

    def position(self, key: DocumentKey) -> int:
        """Return the position of a document. Raises KeyError for a row that is not among them."""
        if not 0 <= key.file < self.num_files:
            raise KeyError(key)
        span = self.span(key.file)
        position = span.start + int(self.rows[span].searchsorted(key.row))
        if position == span.stop or self.rows[position] != key.row:
            raise KeyError(key)
        return position

    def key(self, position: int) -> DocumentKey:
        """Return the key of the document at a position."""
        file = int(self._starts.searchsorted(position, side="right")) - 1
        return DocumentKey(file, int(self.rows[position]))

    def at(self, position: int) -> TokenEstimate:
        """Return the estimate of the document at a position."""
        return TokenEstimate(int(self.num_prompt_tokens[position]), int(self.max_new_tokens[position]))

    def group_starts(self, group_rows: Sequence[Sequence[int]]) -> NDArray[np.int64]:
        """Return the position [G] at which each row group begins that holds documents.

        group_rows: the rows of each group of each file; a file that has none here is one group.
        """
        starts = [np.empty(0, np.int64)]
        for file in range(self.num_files):
            span = self.span(file)
            sizes = group_rows[file] if file < len(group_rows) else ()
            ends = np.cumsum(np.array([0, *sizes][:-1] if sizes else [0], np.int64))
            begins = np.unique(self.rows[span].searchsorted(ends))
            starts.append(span.start + begins[begins < span.stop - span.start])
        return np.concatenate(starts)
