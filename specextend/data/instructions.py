"""Instructions: templates with columns of a row and a place for its document."""

import re
import secrets
from collections.abc import Callable, Iterator
from datetime import date
from functools import wraps
from typing import Any, NoReturn

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, Undefined, meta, nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specextend.core import ReadOnly, first_line, mended, printable
from specextend.data.inputs import DocumentError

Around = tuple[str, str]
"""Text of a user message before and after the document."""
DOCUMENT = "document"
PLACE = f"{{{{ {DOCUMENT} }}}}"


class _Method:
    def __init__(self, method: Callable[..., Any]):
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._method(*args, **kwargs)

    def _refuse(self, *others: object) -> NoReturn:
        raise TypeError(
            f"{getattr(self._method, '__name__', 'this')} is a method, no value: call it, with ()"
        )

    __repr__ = __bool__ = __eq__ = _refuse
    __hash__ = None  # type: ignore[assignment]


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja environment for values of rows.

    Struct fields hide methods, and fields of null are null. Methods that depend on the clock or the
    machine are refused.
    """

    def getattr(self, obj: Any, attribute: str) -> Any:
        if obj is None:
            return None
        if isinstance(obj, dict) and attribute in obj:
            return obj[attribute]
        if isinstance(obj, date) and attribute in _HERE_AND_NOW:
            raise TypeError(
                f"{attribute} differs from one machine or day to the next; compute it in the input"
            )
        value = super().getattr(obj, attribute)
        return _Method(value) if callable(value) and not isinstance(value, Undefined) else value

    def getitem(self, obj: Any, argument: Any) -> Any:
        if obj is None or isinstance(argument, str):
            return self.getattr(obj, argument)
        return super().getitem(obj, argument)


def _written(value: Any) -> Any:
    if callable(value) and not isinstance(value, Undefined):
        raise TypeError(f"a {type(value).__name__.strip('_').lower()} is no text")
    return "" if value is None else value


def _listed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a filter to return lists: the text of an iterator is a memory address."""

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return [*found] if isinstance(found, Iterator) else found

    return call


_SENTINEL = f"\u2063{secrets.token_hex(16)}\u2063"
"""Stand-in for the document while a template is rendered, unknown to authors of data."""
_ENVIRONMENT = _Environment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=_written
)
_ENVIRONMENT.globals.clear()  # every name is a column
del _ENVIRONMENT.filters["random"]
_ENVIRONMENT.filters |= {name: _listed(each) for name, each in _ENVIRONMENT.filters.items()}
_HERE_AND_NOW = ("now", "today", "utcnow", "astimezone", "timestamp", "fromtimestamp")
_WORDS = ("self", "none", "true", "false")
_AROUND_DOCUMENT = (nodes.Output, nodes.If, nodes.For, nodes.With)
"""Nodes that may contain `{{ document }}`, because they do not inspect their output."""
_PLACES = re.compile(r"\{\{\s*document\s*\}\}")
_ASKS = ("default", "d", "defined", "undefined")
_SINGLE_BRACES = re.compile(r"(?<!\{)\{\s*(\w+)\s*\}(?!\})")


class Instruction:
    """User message as a sandboxed jinja2 template.

    `{{ document }}` is the document, and any other name a column of the row. A message without `{{
    document }}` ends with a blank line and the document.

    Args:
        key: Configuration key, for error messages.
        place: Name of the document in the template.

    Raises:
        ValueError: The template is invalid, has a name in single braces, or uses the document in an
            expression, which would see a stand-in.
    """

    def __init__(self, key: str, source: str, place: str = DOCUMENT):
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
            raise ValueError(
                f"{key} is not a template: {first_line(error)} (line {error.lineno})"
            ) from None
        _check_names(key, tree, place)
        self._made_of = key, source, place
        self._place = place
        self.columns = tuple(sorted(names - {place}))
        self.fields = tuple(path for path in _paths(tree) if path[0] in self.columns)
        """Paths of struct fields, each with its column first."""
        if not self.columns:
            try:
                self.around({})
            except DocumentError as error:
                raise ValueError(f"{key} cannot be used: {error.message}") from None

    def __reduce__(self) -> tuple[Any, ...]:
        return Instruction, self._made_of

    def around(self, values: ReadOnly) -> Around:
        """Return the text before and after the document, from the values of `columns`.

        Raises:
            DocumentError: `BadInstruction`, if the values do not fit, or the document has several
                places.
        """
        row = mended(values, decodes=True)
        try:
            text = self._template.render(row, **{self._place: _SENTINEL})
        except (
            TemplateError,
            ArithmeticError,
            AttributeError,
            LookupError,
            TypeError,
            ValueError,
        ) as error:
            raise _bad(printable(first_line(error))) from error
        return _split(text)


def _check_names(key: str, node: nodes.Node, place: str, *, sees: bool = False) -> None:
    for child in node.iter_child_nodes():
        is_written = isinstance(node, nodes.Output)
        name = child.name if isinstance(child, nodes.Name) else None
        if is_written and isinstance(child, nodes.Const) and not isinstance(child.value, str):
            name = str(child.value).lower()
        if name in _WORDS:
            raise ValueError(
                f"{key} writes {name}, which is a word of jinja's and no column: rename the column"
            )
        if name == place and (sees or not is_written):
            raise ValueError(
                f"{key} uses {place} in an expression, which would not see its text: write "
                f"{{{{ {place} }}}} alone, outside of filters, conditions and macros"
            )
        _check_names(key, child, place, sees=sees or not isinstance(child, _AROUND_DOCUMENT))


def _paths(tree: nodes.Template) -> Iterator[tuple[str, ...]]:
    asked = [each.node for each in tree.find_all((nodes.Filter, nodes.Test)) if each.name in _ASKS]
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if node not in asked and (path := _path(node)):
            yield path


def _path(node: nodes.Node) -> tuple[str, ...]:
    match node:
        case nodes.Name(name=name):
            return (name,)
        case (
            nodes.Getattr(node=owner, attr=name)
            | nodes.Getitem(node=owner, arg=nodes.Const(value=str(name)))
        ):
            path = _path(owner)
            return (*path, name) if path else ()
    return ()


def around_document(instruction: str) -> Around:
    """Return the text before and after the document of an instruction from a row, which is no
    template.

    Raises:
        DocumentError: `BadInstruction`, for several places.
    """
    return _split(_PLACES.sub(_SENTINEL, instruction))


def _split(text: str) -> Around:
    if _SENTINEL not in text:
        return (f"{text}\n\n" if text else ""), ""
    before, _, behind = text.partition(_SENTINEL)
    if _SENTINEL in behind:
        raise _bad(f"it has {PLACE} more than once")
    return before, behind


def _bad(why: str) -> DocumentError:
    return DocumentError("BadInstruction", f"the instruction: {why}", stage="prompt")
