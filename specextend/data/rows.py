"""A row of the input: its document, pages, and individual prompt and sampling options."""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pyarrow as pa

from specextend.core import (
    DocumentKey,
    ReadOnly,
    SamplingParams,
    Values,
    first_line,
    mended,
)
from specextend.data.inputs import MOST_TOKENS, DocumentError, InputOptions
from specextend.data.instructions import Around, Instruction, around_document

ROW_OPTIONS = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
"""Fields allowed in `input.options_column`."""


@dataclass(frozen=True)
class Row:
    """An input row, ready for its prompt."""

    key: DocumentKey
    doc_id: str
    text: str
    max_new_tokens: int | None
    """Limit of the row; None for the limit of the run."""
    reference: str | None
    content_sha256: str
    instruction: Around | None = None
    """Instruction of the row, or of the run with the row's values; None for the run's instruction.
    """
    others: tuple[Around | None, ...] = ()
    sampling: ReadOnly = field(default_factory=dict)
    """Fields of SamplingParams that differ from the run."""
    page_starts: Sequence[int] = ()
    """Offsets in `text` at which pages begin; empty without pages."""
    passed: pa.Table | None = field(default=None, compare=False, repr=False)
    """Passthrough columns named by rules."""


@dataclass(frozen=True)
class RowReader:
    """Makes rows from column values. `rule_columns` are passthrough columns named by rules."""

    options: InputOptions
    templates: tuple[Instruction, ...] = ()
    rule_columns: tuple[str, ...] = ()

    @property
    def template_columns(self) -> tuple[str, ...]:
        """Columns named by the instructions."""
        return tuple(
            _named(*(column for template in self.templates for column in template.columns))
        )

    @property
    def content_columns(self) -> list[str]:
        """Columns that determine `content_sha256`."""
        options = self.options
        wanted = (options.text_column, options.options_column, options.instruction_column)
        return _named(*wanted, *self.template_columns)

    @property
    def value_columns(self) -> list[str]:
        """Columns used by `read`."""
        options = self.options
        return _named(*self.content_columns, options.reference_column, options.pages_column)

    @property
    def document_columns(self) -> list[str]:
        """Columns to read for a document."""
        return _named(*self.value_columns, self.options.id_column, *self.rule_columns)

    def read(self, key: DocumentKey, doc_id: str, values: ReadOnly) -> Row:
        """Make a row from column values, with texts as bytes.

        Raises:
            DocumentError: The text, its pages or an option of the row are invalid.
        """
        options = self.options
        try:
            text = decode_text(values[options.text_column])
            own = own_options(self.own(values))
            max_new_tokens = check_max_new_tokens(own.pop("max_new_tokens", None))
            instruction, *others = self._instructions(values)
            page_starts = self.page_starts(values, text)
        except DocumentError as error:
            error.doc_id, error.content_sha256 = doc_id, self.content(values)
            raise
        reference = values[options.reference_column] if options.reference_column else None
        summary = None if reference is None else reference.decode("utf-8", errors="replace")
        content = self.content(values)
        return Row(
            key,
            doc_id,
            text,
            max_new_tokens,
            summary,
            content,
            instruction,
            tuple(others),
            own,
            page_starts,
        )

    def page_starts(self, values: ReadOnly, text: str) -> Sequence[int]:
        """Return the offsets of a row's pages. Raises DocumentError."""
        column = self.options.pages_column
        return check_pages(values[column], text) if column else ()

    def content(self, values: ReadOnly) -> str:
        """Return the SHA-256 of everything in a row that affects its answer.

        Lengths are hashed too, so rows with shifted text differ. Template values count only without
        an instruction in the row.
        """
        asked = self._asked(values)
        used = {} if asked else {name: values[name] for name in self.template_columns}
        told = {name: value for name, value in self.own(values).items() if value is not None}
        others = json.dumps([told, used], sort_keys=True, default=repr).encode()
        digest = hashlib.sha256()
        for part in (values[self.options.text_column] or b"", asked, others):
            digest.update(f"{len(part)}:".encode() + part)
        return digest.hexdigest()

    def own(self, values: ReadOnly) -> ReadOnly:
        """Return the options of a row by name; an integer is the limit."""
        column = self.options.options_column
        given = values[column] if column else None
        return given if isinstance(given, dict) else {"max_new_tokens": given}

    def _instructions(self, values: ReadOnly) -> list[Around | None]:
        asked = self._asked(values)
        if not asked:
            own = [each.around(values) if each.columns else None for each in self.templates]
            return own or [None]
        try:
            return [around_document(asked.decode())]
        except UnicodeDecodeError as error:
            raise DocumentError(
                "BadInstruction", f"the instruction is not UTF-8: {error.reason}"
            ) from error

    def _asked(self, values: ReadOnly) -> bytes:
        column = self.options.instruction_column
        asked: bytes = (values[column] if column else None) or b""
        return asked if asked.decode(errors="replace").strip() else b""


def own_options(values: ReadOnly) -> Values:
    """Return the non-null options of a row. Raises DocumentError."""
    own = {name: value for name, value in values.items() if value is not None}
    if "stop" in own:
        own["stop"] = tuple(mended(own["stop"], decodes=True))
    try:
        SamplingParams(**{name: value for name, value in own.items() if name != "max_new_tokens"})
    except (TypeError, ValueError) as error:
        raise DocumentError("BadOptions", first_line(error)) from error
    return own


def is_options(kind: pa.DataType) -> bool:
    """Return True for a valid type of `input.options_column`."""
    kinds = {
        "temperature": pa.types.is_floating,
        "top_p": pa.types.is_floating,
        "stop": lambda of: pa.types.is_list(of) and pa.types.is_string(of.value_type),
    }
    if not pa.types.is_struct(kind):
        return pa.types.is_integer(kind) or pa.types.is_null(kind)
    return all(
        each.name in ROW_OPTIONS and kinds.get(each.name, pa.types.is_integer)(each.type)
        for each in kind
    )


def decode_text(data: bytes | None) -> str:
    """Decode the text of a document. Raises DocumentError if null, blank or not UTF-8."""
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
    """Return the limit of a row. Raises DocumentError if out of range."""
    if value is not None and not 1 <= value <= MOST_TOKENS:
        raise DocumentError(
            "BadMaxNewTokens", f"max_new_tokens must be at least 1 and at most 2^40, got {value}"
        )
    return value


def _named(*columns: str | None) -> list[str]:
    return list(dict.fromkeys(column for column in columns if column is not None))


def is_pages(kind: pa.DataType) -> bool:
    """Return True for a valid type of `input.pages_column`."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    return pa.types.is_null(kind) or (is_list and pa.types.is_integer(kind.value_type))


def check_pages(starts: Sequence[int | None] | None, text: str) -> Sequence[int]:
    """Return the offsets at which pages begin; empty for null.

    Raises:
        DocumentError: The offsets do not begin with 0, fall, or are beyond the text (`BadPages`).
    """
    checked: list[int] = []
    for start in starts or ():
        least, most = (checked[-1], len(text)) if checked else (0, 0)
        if start is None or not least <= start <= most:
            where = "null" if start is None else f"{start:,}"
            raise DocumentError(
                "BadPages",
                f"page {len(checked) + 1} begins at {where}; offsets of pages begin with 0, do not "
                f"fall, and end within the text of {len(text):,} characters",
            )
        checked.append(start)
    return checked
