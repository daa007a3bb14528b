"""The options of the input and output, the errors of input files and documents, and what is known
of a file.
"""

import re
from dataclasses import dataclass, field, fields
from typing import Literal

from specextend.core import Values, one_line, printable
from specextend.data.answers import free_fields, schema_of
from specextend.data.database import filter_columns
from specextend.data.storage import NO_CREDENTIALS, holds_secret

MOST_AHEAD_BYTES = 256 << 20
"""Memory of the input files that are read at once, or wait to be taken."""
_SMALL_BYTES = 16 << 20
MOST_TOKENS = 1 << 40
"""More than any document has; an unsigned column may hold what overflows our sums."""


_NOT_SUPPORTED = ("not supported", "Unsupported", "not implemented", "Not yet implemented")
"""Parts of pyarrow's messages about compressions, encodings and types that it cannot decode."""


class InputError(ValueError):
    """The whole input is unusable: exit 2. The message is one printable line that says what to
    do.
    """

    def __init__(self, message: str):
        super().__init__(printable(message))


class InputChangedError(InputError):
    """A file has changed since the run began, so the remaining documents cannot be read from it."""


class InputUnreachableError(InputError):
    """The store that holds a file does not answer, so nothing is known about the file itself."""


def unreachable(file: str, error: Exception) -> InputUnreachableError:
    """Return the error for a file whose store does not answer, or whose system does not let it be
    read now.
    """
    return InputUnreachableError(f"{file} cannot be reached ({one_line(error)}); run again")


def unreadable(file: str, error: Exception) -> InputError:
    """Return the error for a file that is not Parquet, is damaged, or uses what pyarrow cannot
    decode.
    """
    if any(word in str(error) for word in _NOT_SUPPORTED):
        return InputError(
            f"{file} uses what pyarrow cannot decode ({one_line(error)}); it is not damaged: write "
            "it anew where it was made, with the compression zstd and plain or dictionary encoding"
        )
    if file.lower().endswith((".parquet", ".pq", ".parq")):
        return InputError(
            f"{file} cannot be read as Parquet ({one_line(error)}); repair it or take it out"
        )
    return InputError(
        f"{file} is not Parquet; make it so: specextend prepare documents INPUT --output FOLDER"
    )


@dataclass(eq=False)
class DocumentError(Exception):
    """One document cannot be processed: it becomes a row in `errors/` and the job goes on. Can be
    pickled.

    error_class: `NullText`, `BadId`, `EmptyText`, `UndecodableText`, `BadMaxNewTokens`,
    `BadOptions` (stage `read`), `BadInstruction` (`read` or `prompt`), `PromptTooLong` (`prompt`),
    `IncompleteAnswer` (`decode`), or the class of what failed in the engine. doc_id,
    content_sha256: set by `RowReader.read`; not known when raised by `Prompts.render`.
    """

    error_class: str
    message: str
    stage: str = "read"
    retryable: bool = False
    doc_id: str = ""
    content_sha256: str | None = None
    summary: str | None = None
    """What was written, of an answer that broke off (`IncompleteAnswer`)."""
    tasks: list[Values] | None = None
    """What the other tasks of a run with several have answered."""

    def __post_init__(self) -> None:
        super().__init__(self.error_class, self.message)  # with which a pickle makes it anew

    def __str__(self) -> str:
        return f"{self.error_class}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """`input.*`: Where the documents are, and what their columns mean."""

    path: str
    """A Parquet file, a folder (searched recursively) or a glob; a local path or a URI. The path of
    a URI is taken as it is written (`s3://bucket/a b#1`); only a `file://` URI is
    percent-encoded.
    """
    text_column: str = "text"
    """The string column with the documents."""
    id_column: str | None = None
    """A string, integer or UUID column with unique ids; without it the id is that of a data set of
    `specextend prepare`, or else `<path relative to the input>:<row in file>`."""
    on_bad_id: Literal["refuse", "error"] = "refuse"
    """Where ids are null or repeated: `refuse` the input, or make each such row an `error` row, of
    equal ids all but the first in input order."""
    passthrough: tuple[str, ...] = ()
    """Columns of any type that are copied to the results; a file may lack them. Folders such as
    `year=2026` make a column, too."""
    reference_column: str | None = None
    """A string column with summaries to compare with; where it is not null, ROUGE is computed."""
    gold: dict[str, str] = field(default_factory=dict)
    """Columns with the right answers, by the field of the answer: `{kind: kind_by_hand}`. They are
    passed through, and reports say how good the answers are."""
    instruction_column: str | None = None
    """A string column that takes the place of `prompt.instruction` where it is neither null nor
    blank. It is no template, but may have one `{{ document }}`.
    """
    options_column: str | None = None
    """A struct column whose fields, where not null, take the place of `decoding.*` for the row:
    `max_new_tokens`, `temperature`, `top_p`, `top_k`, `seed`, `stop` (a list of strings); or an
    integer column, which is `max_new_tokens` alone."""
    filter: str | None = None
    """Only the rows that match a condition of SQL, such as `lang = 'en' AND pages > 2`."""
    sample: float | int | None = None
    """Only a random part of the rows: a fraction (`0.01`) or a number (`500`). Each row's id
    decides, so the same documents are drawn from a larger input."""
    except_done_in: tuple[str, ...] = ()
    """Output folders of earlier runs, or globs of them: rows that are done there and have not
    changed are left out.
    """
    redo_in: str | None = None
    """The output folder of a run, for `redo`. `--redo` sets both."""
    redo: str | None = None
    """Only the rows whose newest result in `redo_in` meets a condition of SQL."""
    limit: int | None = None
    """At most so many rows, the first ones in input order; applied last."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) == "":
                raise ValueError(f"input.{option.name} must not be empty")
        if holds_secret(self.path):
            raise ValueError(f"input.path {NO_CREDENTIALS}")
        if any(map(holds_secret, self.except_done_in)):
            raise ValueError(f"input.except_done_in {NO_CREDENTIALS}")
        if holds_secret(self.redo_in or ""):
            raise ValueError(f"input.redo_in {NO_CREDENTIALS}")
        if not all(self.except_done_in):
            raise ValueError("input.except_done_in must not hold an empty path")
        self._check_selection()
        repeated = {name for name in self.passthrough if self.passthrough.count(name) > 1}
        if repeated:
            raise ValueError(
                f"input.passthrough names {', '.join(sorted(repeated))} more than once"
            )

    def _check_selection(self) -> None:
        if self.filter is not None:
            filter_columns(self.filter)
        if (self.redo is None) != (self.redo_in is None):
            raise ValueError("input.redo and input.redo_in need each other; --redo sets both")
        if self.redo is not None:
            filter_columns(self.redo, "--redo")
        if isinstance(self.sample, float) and not 0 < self.sample < 1:
            raise ValueError(
                "input.sample must be a fraction between 0 and 1 or a number of rows, got "
                f"{self.sample}"
            )
        for name, count in (("sample", self.sample), ("limit", self.limit)):
            if isinstance(count, int) and count < 1:
                raise ValueError(f"input.{name} must be at least 1, got {count}")

    @property
    def depends_on_runs(self) -> bool:
        """Return True if the rows that are wanted depend on what other runs have done."""
        return bool(self.except_done_in) or self.redo is not None

    @property
    def selects(self) -> bool:
        """Return True if only some rows of the input may be wanted."""
        return self.depends_on_runs or any(
            each is not None for each in (self.filter, self.sample, self.limit)
        )

    @property
    def has_limits(self) -> bool:
        """Return True if rows may have limits of their outputs themselves."""
        return self.options_column is not None

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """Return the columns that results copy: passthrough columns and right answers."""
        return tuple(dict.fromkeys((*self.passthrough, *self.gold.values())))

    @property
    def filter_columns(self) -> tuple[str, ...]:
        """Return the columns that the filter reads."""
        return () if self.filter is None else filter_columns(self.filter)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """`output.*`: Where the results go."""

    path: str
    """The folder of the run, a local path or a URI; created if it does not exist."""
    column: str = "summary"
    """The column with the texts that the model wrote."""
    schema: str | Values | None = None
    """Answers are JSON objects, each field a column: the name of a JSON Schema file, the schema,
    or names with types, such as `{agency: string, sum: number, topics: [string], kind: audit |
    budget, date: "string?"}`. One of values alone is scored."""
    sources: bool = False
    """Find in its document what was written: each string of an answer, choices excepted (column
    `evidence`), or the passages that each sentence of a text rests on (column `sources`)."""
    figures: bool = False
    """Find in its document each number, sum of money, percentage, date and year that was written
    (column `figures`, flag `figure_not_found`)."""
    confidence: bool = False
    """Say how sure the target was (column `confidence`): of each field, or of a text and of its
    least certain sentence; and score fields of known values that stand beside others
    (`choices`)."""
    rules: dict[str, str] = field(default_factory=dict)
    """Conditions of SQL by name, such as `{short: "length(summary) < 900"}`, over the answer's
    columns, `quality_flags` and `input.passthrough`. A text that does not meet one has the flag
    `rule:NAME`."""

    def __post_init__(self) -> None:
        for name, condition in self.rules.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(
                    f"output.rules: name {name!r} with letters, digits, - and _: it is a flag"
                )
            filter_columns(condition, f"output.rules.{name}")
        if self.schema is not None:
            object.__setattr__(self, "schema", schema_of(self.schema))
        if not self.column:
            raise ValueError("output.column must not be empty")
        if not self.path:
            raise ValueError("output.path must not be empty")
        if holds_secret(self.path):
            raise ValueError(f"output.path {NO_CREDENTIALS}")

    @property
    def rule_columns(self) -> frozenset[str]:
        """Return the columns that the rules read."""
        return frozenset(name for each in self.rules.values() for name in filter_columns(each))

    @property
    def json_schema(self) -> str | None:
        """Return the JSON Schema of `schema` as text."""
        return None if self.schema is None else str(self.schema)

    @property
    def evidence_for(self) -> frozenset[str] | None:
        """Return the fields whose strings are looked up in the document; None if that is not
        wanted.
        """
        return free_fields(str(self.schema), "string") if self.sources and self.schema else None

    @property
    def figures_for(self) -> frozenset[str] | None:
        """Return the fields whose figures are looked up, none for a text; None if that is not
        wanted.
        """
        if not self.figures:
            return None
        kinds = ("string", "number", "integer")
        return free_fields(str(self.schema), *kinds) if self.schema else frozenset()


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
    """Time of the last write, in nanoseconds since the epoch, at this start; None if the store does
    not report it.
    """
    compact: tuple[str, ...] = ()
    """Text columns that can be read as dictionaries."""

    @property
    def num_rows(self) -> int:
        """Return the number of rows in all row groups."""
        return sum(self.group_rows)

    @property
    def facts(self) -> Values:
        """Return what a manifest records of the file; two files with equal facts hold the same."""
        return {"size": self.size, "rows": self.num_rows, "footer_sha256": self.footer_sha256}

    @property
    def is_small(self) -> bool:
        """Return True if all documents may be in memory at once while other files are."""
        return self.largest_group_bytes * len(self.group_rows) <= _SMALL_BYTES

    def bytes_ahead(self) -> int:
        """Return the most bytes that are in memory while the file is read beside others."""
        return min(self.largest_group_bytes * len(self.group_rows), _SMALL_BYTES)
