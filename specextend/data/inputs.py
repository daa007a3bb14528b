"""The options, errors, files and rows of the input."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.core import Document, DocumentKey, one_line, printable
from specextend.data.storage import holds_secret


class InputError(ValueError):
    """The whole input is unusable: exit 2. The message is one printable line that says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


class InputChangedError(InputError):
    """A file has changed since the run began, so the remaining documents cannot be read from it."""


class InputUnreachableError(InputError):
    """The store that holds a file does not answer, so nothing is known about the file itself."""


def unreadable(file: str, error: Exception) -> InputError:
    """Return the error for a file that is not Parquet, or is damaged."""
    return InputError(f"{file} cannot be read as Parquet ({one_line(error)}); repair it or take it out")


class DocumentError(Exception):
    """One document cannot be processed: it becomes a row in `errors/` and the job goes on. Can be pickled.

    error_class: `NullText`, `EmptyText`, `UndecodableText`, `BadMaxNewTokens` (stage `read`) or `PromptTooLong` (stage
    `prompt`). doc_id: set by `Source.read`, empty when raised by `Prompts.render`, which has no id.
    """

    def __init__(
        self, error_class: str, message: str, stage: str = "read", retryable: bool = False, doc_id: str = ""
    ) -> None:
        super().__init__(error_class, message, stage, retryable, doc_id)
        self.error_class = error_class
        self.message = message
        self.stage = stage
        self.retryable = retryable
        self.doc_id = doc_id

    def __str__(self) -> str:
        return f"{self.error_class}: {self.message}"


@dataclass(frozen=True, kw_only=True, slots=True)
class InputOptions:
    """`input.*`: Where the documents are, and what their columns mean."""

    path: str
    """A Parquet file, a folder or a glob; a local path or a URI.

    A folder is searched recursively for files that end in `.parquet`, `.pq` or `.parq`, in upper or lower case. The
    path of a URI is taken as it is written (`s3://bucket/a b#1`); only a `file://` URI is percent-encoded."""
    text_column: str = "text"
    """The string column with the documents."""
    id_column: str | None = None
    """A string or integer column with unique ids; without it the id is `<path relative to the input>:<row in file>`."""
    passthrough: tuple[str, ...] = ()
    """Columns of any type that are copied to the summaries."""
    max_new_tokens_column: str | None = None
    """An integer column that overrides `decoding.max_new_tokens` where it is not null."""
    num_tokens_column: str | None = None
    """An integer column with the documents' lengths in tokens, so that planning need not read the text. If a file has a
    value that is null or below 1, its text is read after all, and the lengths of those documents are estimated."""
    reference_column: str | None = None
    """A string column with summaries to compare with; where it is not null, ROUGE is computed."""

    def __post_init__(self) -> None:
        for name in (
            "path",
            "text_column",
            "id_column",
            "max_new_tokens_column",
            "num_tokens_column",
            "reference_column",
        ):
            if getattr(self, name) == "":
                raise ValueError(f"input.{name} must not be empty")
        if holds_secret(self.path):
            raise ValueError("input.path must not hold credentials; give them in the environment")
        repeated = {name for name in self.passthrough if self.passthrough.count(name) > 1}
        if repeated:
            raise ValueError(f"input.passthrough names {', '.join(sorted(repeated))} more than once")

    @property
    def document_columns(self) -> list[str]:
        """Return the columns that a row is read from."""
        wanted = (self.text_column, self.id_column, self.max_new_tokens_column, self.reference_column)
        return list(dict.fromkeys(column for column in wanted if column is not None))


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """`output.*`: Where the results go."""

    path: str
    """The folder of the run, a local path or a URI; created if it does not exist."""

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("output.path must not be empty")
        if holds_secret(self.path):
            raise ValueError("output.path must not hold credentials; give them in the environment")


@dataclass(frozen=True, slots=True)
class InputFile:
    """One Parquet file of the input."""

    number: int
    relative_path: str
    """Path relative to the input's root, with `/`."""
    size: int
    """Size in bytes."""
    group_rows: tuple[int, ...]
    """Number of rows in each row group."""
    largest_group_bytes: int
    """Bytes that the columns of a document take when they are read from the largest row group."""
    footer_sha256: str
    modified_ns: int | None
    """Time of the last write, in nanoseconds since the epoch, at this start; None if the store does not report it."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all row groups."""
        return sum(self.group_rows)


@dataclass(frozen=True, slots=True)
class Row:
    """One input row, ready to be rendered into a prompt."""

    document: Document
    max_new_tokens: int | None
    """Limit of the row itself; None: the run's limit applies."""
    reference: str | None
    """A summary to compare with, if there is one."""


@dataclass(frozen=True, slots=True)
class ScannedRow:
    """The facts about a row that planning needs."""

    key: DocumentKey
    text: bytes | None
    """None if it is null, or if `num_tokens_column` makes reading it unnecessary."""
    num_bytes: int | None
    """Bytes of the text, 0 if it is null; None if `num_tokens_column` makes reading it unnecessary."""
    num_tokens: int | None
    """Value of `num_tokens_column`; None without that column, and if it is null or below 1."""
    max_new_tokens: int | None
    error_class: str | None
    """The error that `Source.read` will raise for the row, as far as the scanned columns can tell; or None."""


def decode_text(data: bytes | None) -> str:
    """Decode a document's text. Raises DocumentError if it is null, not UTF-8, or nothing but white space."""
    if data is None:
        raise DocumentError("NullText", "the text is null")
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DocumentError(
            "UndecodableText", f"the text is not UTF-8: {error.reason} at byte {error.start}"
        ) from error
    if not text or text.isspace():
        raise DocumentError("EmptyText", "the text is empty or white space")
    return text


def check_max_new_tokens(value: int | None) -> int | None:
    """Return a row's own limit. Raises DocumentError if it is below 1."""
    if value is not None and value < 1:
        raise DocumentError("BadMaxNewTokens", f"max_new_tokens must be at least 1, got {value}")
    return value
