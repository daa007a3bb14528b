"""Instructions: templates over the columns of a row, with a place for its document."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specextend.core import first_line, printable
from specextend.data.inputs import DocumentError

Around = tuple[str, str]
"""The text of a user message before and behind the document."""
DOCUMENT = "document"
PLACE = f"{{{{ {DOCUMENT} }}}}"
"""Stands for the document in an instruction; any other name is a column."""


class _Environment(ImmutableSandboxedEnvironment):
    """Fields of a struct that is null are null."""

    def getattr(self, obj: Any, attribute: str) -> Any:
        return None if obj is None else super().getattr(obj, attribute)

    def getitem(self, obj: Any, argument: Any) -> Any:
        return None if obj is None else super().getitem(obj, argument)


_SENTINEL = "\u2063DOCUMENT\u2063"
_ENVIRONMENT = _Environment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=lambda value: "" if value is None else value
)
_PLACES = re.compile(r"\{\{\s*document\s*\}\}")
_ASKS = ("default", "d", "defined", "undefined")
"""Filters and tests of jinja2 for what may not be there."""
_SINGLE_BRACES = re.compile(r"(?<!\{)\{\s*(\w+)\s*\}(?!\})")


class Instruction:
    """A user message as a sandboxed jinja2 template: `{{ document }}`, and any other name for a column of the row.

    A message without `{{ document }}` has the document behind it, after a blank line. Raises ValueError, which begins
    with `key`, for what is no template, and for a name in single braces, which would be read as text.
    """

    def __init__(self, key: str, source: str) -> None:
        if wrong := _SINGLE_BRACES.search(source):
            raise ValueError(
                f"{key} has {wrong[0]}, which would be read as text; write {{{{ {wrong[1]} }}}}, "
                f"or {{{{ '{wrong[0]}' }}}} if the braces are meant"
            )
        try:
            tree = _ENVIRONMENT.parse(source)
            names = meta.find_undeclared_variables(tree)
            self._template = _ENVIRONMENT.from_string(source)
        except TemplateSyntaxError as error:
            raise ValueError(f"{key} is not a template: {first_line(error)} (line {error.lineno})") from None
        self._made_of = key, source
        self.columns = tuple(sorted(names - {DOCUMENT, *_ENVIRONMENT.globals}))
        """The columns that it names."""
        self.fields = tuple(path for path in _paths(tree) if path[0] in self.columns)
        """What it reads of structs: a column, and the names of fields below it."""
        if not self.columns:
            try:
                self.around({})
            except DocumentError as error:
                raise ValueError(f"{key} cannot be used: {error.message}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Instruction, self._made_of

    def around(self, values: Mapping[str, Any]) -> Around:
        """Return the text before and behind the document. values: of a row's `columns`; null is an empty string.

        Raises DocumentError (`BadInstruction`, stage `prompt`) if they do not go into the template, or if it comes to
        more than one place for the document.
        """
        row = {name: _clean(value) for name, value in values.items()}
        try:
            text = self._template.render(row, **{DOCUMENT: _SENTINEL})
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError) as error:
            raise _bad(printable(first_line(error))) from error
        return _split(text)


def _paths(tree: nodes.Template) -> Iterator[tuple[str, ...]]:
    """Yield the fields that a template reads, but not those that it asks for, because they may not be there."""
    asked = [each.node for each in tree.find_all((nodes.Filter, nodes.Test)) if each.name in _ASKS]
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if node not in asked and (path := _path(node)):
            yield path


def _path(node: nodes.Node) -> tuple[str, ...]:
    """Return the names in `a.b` or `a["b"]`; none for any other expression."""
    match node:
        case nodes.Name(name=name):
            return (name,)
        case nodes.Getattr(node=owner, attr=name) | nodes.Getitem(node=owner, arg=nodes.Const(value=str(name))):
            path = _path(owner)
            return (*path, name) if path else ()
    return ()


def around_document(instruction: str) -> Around:
    """Return the text before and behind the document of an instruction that is data: no template, only its place.

    Raises DocumentError (`BadInstruction`) for more than one place.
    """
    return _split(_PLACES.sub(_SENTINEL, instruction.replace(_SENTINEL, "")))


def _clean(value: Any) -> Any:
    """Return a value of a column as a template takes it: text for bytes, and no place for the document."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", errors="replace")
    return value.replace(_SENTINEL, "") if isinstance(value, str) else value


def _split(text: str) -> Around:
    if _SENTINEL not in text:
        return (f"{text}\n\n" if text else ""), ""
    before, _, behind = text.partition(_SENTINEL)
    if _SENTINEL in behind:
        raise _bad(f"it has {PLACE} more than once")
    return before, behind


def _bad(why: str) -> DocumentError:
    return DocumentError("BadInstruction", f"the instruction: {why}", stage="prompt")
