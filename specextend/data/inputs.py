"""Options of input and output, errors about input files and documents, facts about a file."""

import re
from dataclasses import dataclass, field, fields

from specextend.core import Values, one_line, printable
from specextend.data.answers import free_fields, schema_of
from specextend.data.database import filter_columns
from specextend.data.storage import NO_CREDENTIALS, holds_secret

MOST_AHEAD_BYTES = 256 << 20
"""Memory for input files that are read ahead."""
_SMALL_BYTES = 16 << 20
MOST_TOKENS = 1 << 40
"""Limit for token counts, above any document, so that sums do not overflow."""


_NOT_SUPPORTED = ("not supported", "Unsupported", "not implemented", "Not yet implemented")
"""Parts of pyarrow's messages about features it cannot decode."""


class InputError(ValueError):
    """The whole input is unusable (exit 2). The message is one printable line with advice."""

    def __init__(self, message: str):
        super().__init__(printable(message))


class InputChangedError(InputError):
    """A file changed after the run began."""


class InputUnreachableError(InputError):
    """The store or system denies access now; the file itself may be fine."""


def unreachable(file: str, error: Exception) -> InputUnreachableError:
    """Return the error for a file that cannot be accessed now."""
    return InputUnreachableError(f"{file} cannot be reached ({one_line(error)}); run again")


def unreadable(file: str, error: Exception) -> InputError:
    """Return the error for a file that is damaged, unsupported or not Parquet."""
    if any(word in str(error) for word in _NOT_SUPPORTED):
        return InputError(
            f"{file} uses a feature that pyarrow cannot decode ({one_line(error)}); it is not "
            "damaged: rewrite it at its source with zstd and plain or dictionary encoding"
        )
    if file.lower().endswith((".parquet", ".pq", ".parq")):
        return InputError(
            f"{file} cannot be read as Parquet ({one_line(error)}); repair or remove it"
        )
    return InputError(
        f"{file} is not Parquet; convert it: specextend prepare documents INPUT --output FOLDER"
    )


@dataclass(eq=False)
class DocumentError(Exception):
    """A document cannot be processed. It becomes a row in `errors/`, and the job goes on.

    Attributes:
        error_class: `NullText`, `EmptyText`, `UndecodableText`, `BadMaxNewTokens`, `BadOptions`,
            `BadPages`, `BadInstruction`, `PromptTooLong`, `IncompleteAnswer`, or the
            class of an engine failure.
        summary: Text of an unfinished answer (`IncompleteAnswer`).
        tasks: Answers of the run's other tasks.
    """

    error_class: str
    message: str
    stage: str = "read"
    retryable: bool = False
    doc_id: str = ""
    content_sha256: str | None = None
    summary: str | None = None
    tasks: list[Values] | None = None

    def __post_init__(self) -> None:
        super().__init__(self.error_class, self.message)  # for pickle

    def __str__(self) -> str:
        return f"{self.error_class}: {self.message}"


@dataclass(frozen=True, kw_only=True)
class InputOptions:
    """`input.*`: Where the documents are, and how to read their columns."""

    path: str
    """A Parquet file, a folder (searched recursively) or a glob; a local path or a URI. The path of
    a URI is taken literally (`s3://bucket/a b#1`); only `file://` URIs are percent-encoded.
    """
    text_column: str = "text"
    """String column with the documents."""
    id_column: str | None = None
    """String, integer or UUID column with unique ids. Default: the ids of a data set of `specextend
    prepare`, otherwise `<path relative to the input>:<row in file>`.
    """
    pages_column: str | None = None
    """Column with the offsets at which the pages of a text begin: rising lists of integers from 0,
    in characters, or null. Default: `page_starts` of a data set of `specextend prepare`, if
    `text_column` is `text`.
    """
    passthrough: tuple[str, ...] = ()
    """Columns of any type to copy to the results. A file may lack them. Folders such as `year=2026`
    count as columns.
    """
    reference_column: str | None = None
    """String column with reference summaries; ROUGE is computed where it is not null."""
    gold: dict[str, str] = field(default_factory=dict)
    """Columns with correct answers by field, such as `{kind: kind_by_hand}`. They are passed
    through, and reports measure the answers against them.
    """
    instruction_column: str | None = None
    """String column that replaces `prompt.instruction` where neither null nor blank. It is not a
    template, but may contain one `{{ document }}`.
    """
    options_column: str | None = None
    """Struct column with values that replace `decoding.*` for the row: `max_new_tokens`,
    `temperature`, `top_p`, `top_k`, `seed`, `stop` (a list of strings). An integer column means
    `max_new_tokens`.
    """
    filter: str | None = None
    """SQL condition for the rows to process, such as `lang = 'en' AND pages > 2`."""
    sample: float | int | None = None
    """Random sample of the rows: a fraction (`0.01`) or a number (`500`). Ids decide, so a larger
    input yields the same documents.
    """
    except_done_in: tuple[str, ...] = ()
    """Output folders of earlier runs, or globs of them. Rows done there are skipped unless they
    have changed.
    """
    redo: str | None = None
    """SQL condition on the newest results of a run for the rows to process. `--redo` sets it."""
    limit: int | None = None
    """Maximum number of rows, in input order; applied last."""

    def __post_init__(self) -> None:
        for option in fields(self):
            if getattr(self, option.name) == "":
                raise ValueError(f"input.{option.name} must not be empty")
        if holds_secret(self.path):
            raise ValueError(f"input.path {NO_CREDENTIALS}")
        if any(map(holds_secret, self.except_done_in)):
            raise ValueError(f"input.except_done_in {NO_CREDENTIALS}")
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
        """True if the chosen rows depend on other runs."""
        return bool(self.except_done_in) or self.redo is not None

    @property
    def selects(self) -> bool:
        """True if rows may be left out."""
        return self.depends_on_runs or any(
            each is not None for each in (self.filter, self.sample, self.limit)
        )

    @property
    def has_limits(self) -> bool:
        """True if rows may have individual output limits."""
        return self.options_column is not None

    @property
    def copied_columns(self) -> tuple[str, ...]:
        """Passthrough columns and columns with correct answers."""
        return tuple(dict.fromkeys((*self.passthrough, *self.gold.values())))

    @property
    def filter_columns(self) -> tuple[str, ...]:
        """Columns of the filter."""
        return () if self.filter is None else filter_columns(self.filter)


@dataclass(frozen=True, kw_only=True)
class OutputOptions:
    """`output.*`: Where the results go."""

    path: str
    """Folder of the run, a local path or a URI; created if missing."""
    column: str = "summary"
    """Column for the texts written by the model."""
    schema: str | Values | None = None
    """Answers are JSON objects with a column per field. Give the name of a JSON Schema file, the
    schema, or names with types: `{agency: string, sum: number, topics: [string], kind: audit |
    budget, date: "string?"}`. A schema with nothing but values is scored.
    """
    sources: bool = False
    """Find the strings of an answer, except choices, in the document (column `evidence`), or the
    passages that support each sentence of a text (column `sources`).
    """
    figures: bool = False
    """Find each number, sum of money, percentage, date and year of the answer in the document
    (column `figures`, flag `figure_not_found`).
    """
    confidence: bool = False
    """Report how sure the target was (column `confidence`), per field, or for a text and its least
    certain sentence. Fields with fixed values beside other fields are scored (`choices`).
    """
    verify: bool = False
    """Ask the target whether the document supports each sentence of a text, or each string of an
    answer (column `verdicts`). The question is `prompt.verification`.
    """
    verify_below: float | None = None
    """Flag texts `unsupported` if a verdict has a lower probability. Unset, no text is flagged; the
    report shows the tenth percentile of a run.
    """
    rules: dict[str, str] = field(default_factory=dict)
    """SQL conditions by name, such as `{short: "length(summary) < 900"}`, over the answer's
    columns, `quality_flags` and `input.passthrough`. Texts that fail get the flag `rule:NAME`.
    """

    def __post_init__(self) -> None:
        for name, condition in self.rules.items():
            if not re.fullmatch(r"[\w-]+", name):
                raise ValueError(
                    f"output.rules: name {name!r} with letters, digits, - and _: it is a flag"
                )
            filter_columns(condition, f"output.rules.{name}")
        if self.verify_below is not None and not (self.verify and 0 < self.verify_below <= 1):
            raise ValueError(
                "output.verify_below must be above 0 and at most 1, with output.verify: true"
            )
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
        """Columns of the rules."""
        return frozenset(name for each in self.rules.values() for name in filter_columns(each))

    @property
    def json_schema(self) -> str | None:
        """JSON Schema of `schema` as text."""
        return None if self.schema is None else str(self.schema)

    @property
    def free_fields(self) -> frozenset[str] | None:
        """Fields with free strings; None for a text."""
        return free_fields(str(self.schema), "string") if self.schema else None

    @property
    def evidence_for(self) -> frozenset[str] | None:
        """Fields to find in the document, or None."""
        return self.free_fields if self.sources else None

    @property
    def figures_for(self) -> frozenset[str] | None:
        """Fields with figures to find, empty for a text, or None."""
        if not self.figures:
            return None
        kinds = ("string", "number", "integer")
        return free_fields(str(self.schema), *kinds) if self.schema else frozenset()


@dataclass(frozen=True, slots=True)
class InputFile:
    """A Parquet file of the input."""

    number: int
    relative_path: str
    size: int
    group_rows: tuple[int, ...]
    largest_group_bytes: int
    """Memory for the document columns of the largest row group."""
    footer_sha256: str
    modified_ns: int | None
    """Nanoseconds since the epoch; None if the store does not report it."""
    compact: tuple[str, ...] = ()
    """Text columns that can be read as dictionaries."""

    @property
    def num_rows(self) -> int:
        """Number of rows."""
        return sum(self.group_rows)

    @property
    def facts(self) -> Values:
        """Facts for the manifest; files with equal facts have equal content."""
        return {"size": self.size, "rows": self.num_rows, "footer_sha256": self.footer_sha256}

    @property
    def is_small(self) -> bool:
        """True if the whole file fits into memory beside others."""
        return self.largest_group_bytes * len(self.group_rows) <= _SMALL_BYTES

    def bytes_ahead(self) -> int:
        """Return the memory needed while the file is read beside others."""
        return min(self.largest_group_bytes * len(self.group_rows), _SMALL_BYTES)
