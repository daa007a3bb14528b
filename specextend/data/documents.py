"""Documents in: a Parquet file, a folder or a glob, audited before any model is loaded, read row group by row group."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pyarrow as pa

from specextend.core import Document, DocumentKey
from specextend.data.storage import Location


class InputError(ValueError):
    """The input cannot be run at all: exit 2. The message is one line and says what to do."""


class DocumentError(Exception):
    """One document cannot be done: a row in `errors/`, the job goes on. Pickles."""

    def __init__(
        self, error_class: str, message: str, *, stage: str = "read", retryable: bool = False, doc_id: str = ""
    ) -> None:
        super().__init__(message)
        self.error_class = error_class
        """`NullText`, `EmptyText`, `UndecodableText`, `BadMaxNewTokens`, `PromptTooLong`."""
        self.message = message
        self.stage = stage
        """`read` or `prompt`."""
        self.retryable = retryable
        self.doc_id = doc_id
        """Set by `Source.read`; empty when raised by `Prompts.render`, which has no id."""


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """`input.*`"""

    path: str
    """A Parquet file, a folder of them (searched recursively) or a glob; a local path or a URI."""
    text_column: str = "text"
    id_column: str | None = None
    """A string or integer column; without it the id is `<path relative to the root>:<row in file>`."""
    passthrough: tuple[str, ...] = ()
    """Input columns copied to the summaries, types kept."""
    max_new_tokens_column: str | None = None
    """An integer column that overrides `decoding.max_new_tokens` where it is not null."""
    num_tokens_column: str | None = None
    """An integer column with the document's length in tokens; spares the planning pass over the text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """`output.*`"""

    path: str
    """The run's folder, a local path or a URI; made when missing."""


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of the input."""

    number: int
    relative_path: str
    """From the input's root, with `/`."""
    size: int
    """Bytes."""
    num_rows: int
    group_rows: tuple[int, ...]
    """Rows of each row group."""
    footer_sha256: str


@dataclass(frozen=True, slots=True)
class Row:
    """One input row, ready to be rendered."""

    document: Document
    max_new_tokens: int | None
    """None: the run's own."""


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """What the plan needs to know of a row."""

    key: DocumentKey
    num_bytes: int | None
    """Bytes of the text; None when `num_tokens_column` spares reading it."""
    num_tokens: int | None
    """From `num_tokens_column`."""
    max_new_tokens: int | None
    error_class: str | None
    """Why `read` will refuse the row, as far as the scan can tell."""


class Source:
    """The input of a run. Pickles small (file list and row counts, no data), reads lazily, thread-safe."""

    options: InputOptions
    root: Location
    files: tuple[InputFile, ...]
    passthrough_fields: tuple[pa.Field, ...]

    @property
    def num_rows(self) -> int:
        """Rows of all files."""
        raise NotImplementedError

    def read(self, key: DocumentKey) -> Row:
        """The row at `key`. Raises DocumentError for null, empty or undecodable text or a bad `max_new_tokens`."""
        raise NotImplementedError

    def doc_id(self, key: DocumentKey) -> str:
        """The row's id alone, for an error row about a document that nobody could read."""
        raise NotImplementedError

    def scan(self) -> Iterator[ScannedRow]:
        """Every row in key order, streaming; raises nothing for a bad row, `error_class` says it."""
        raise NotImplementedError


def open_source(options: InputOptions, output: OutputOptions | None = None) -> Source:
    """List and audit the input (and that `output` is apart from it); reads footers and the id column only.

    Raises InputError (DESIGN: run error) before anything is loaded or written.
    """
    raise NotImplementedError
