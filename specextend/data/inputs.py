"""The nouns of the input: its options, its errors, its files and rows."""

from __future__ import annotations

from dataclasses import dataclass

from specextend.core import Document, DocumentKey
from specextend.data.storage import holds_secret


class InputError(ValueError):
    """The input cannot be run at all: exit 2. The message is one printable line and says what to do."""

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


def printable(text: str) -> str:
    """One line of text that a terminal shows as it is: names and ids may hold line ends and escape codes."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in text)


class InputChangedError(InputError):
    """A file is not what it was when the run began: what is left cannot be done from it."""


class InputUnreachableError(InputError):
    """The store of a file does not answer: nothing is known about the file itself."""


def unreadable(file: str, error: Exception) -> InputError:
    """A file that is no Parquet, or not to its end."""
    message = " ".join(str(error).split())
    return InputError(f"{file} cannot be read as Parquet ({message}); repair it or take it out")


class DocumentError(Exception):
    """One document cannot be done: a row in `errors/`, the job goes on. Pickles.

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

    def __post_init__(self) -> None:
        for name in ("path", "text_column", "id_column", "max_new_tokens_column", "num_tokens_column"):
            if getattr(self, name) == "":
                raise ValueError(f"input.{name} must not be empty")
        if holds_secret(self.path):
            raise ValueError("input.path must not hold credentials; give them in the environment")
        repeated = {name for name in self.passthrough if self.passthrough.count(name) > 1}
        if repeated:
            raise ValueError(f"input.passthrough names {', '.join(sorted(repeated))} more than once")


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """`output.*`"""

    path: str
    """The run's folder, a local path or a URI; made when missing."""

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
    """From the input's root, with `/`."""
    size: int
    """Bytes."""
    group_rows: tuple[int, ...]
    """Rows of each row group."""
    largest_group_bytes: int
    """Uncompressed bytes of the largest row group, the columns that a document is made of counted."""
    footer_sha256: str
    modified_ns: int | None
    """When it was last written, since the epoch, as this start found it; None where the store does not say."""

    @property
    def num_rows(self) -> int:
        """Rows of all its row groups."""
        return sum(self.group_rows)


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
    """Bytes of the text, 0 where it is null; None when `num_tokens_column` spares reading it."""
    num_tokens: int | None
    """From `num_tokens_column`; None without it and where it is null."""
    max_new_tokens: int | None
    error_class: str | None
    """Why `Source.read` will refuse the row, as far as the columns scanned can tell."""
