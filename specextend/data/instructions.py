"""Instructions: templates over the columns of a row, with a place for its document."""

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
"""The text of a user message before and behind the document."""
DOCUMENT = "document"
PLACE = f"{{{{ {DOCUMENT} }}}}"
"""Stands for the document in an instruction; any other name is a column."""


class _Method:
    """A method of a value: it can be called, but is neither text nor true or false nor equal to
    anything.
    """

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
    """Fields of a struct come before its methods, and fields of a struct that is null are null.

    What differs from one machine or day to the next cannot be asked.
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
    """Return a value as a template writes it: null is nothing. Raises TypeError for a macro, a loop
    or a method.
    """
    if callable(value) and not isinstance(value, Undefined):
        raise TypeError(f"a {type(value).__name__.strip('_').lower()} is no text")
    return "" if value is None else value


def _listed(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that gives a list where it gave an iterator, whose text is a place in
    memory.
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        found = function(*args, **kwargs)
        return [*found] if isinstance(found, Iterator) else found

    return call


_SENTINEL = f"\u2063{secrets.token_hex(16)}\u2063"
"""Stands for the document while a template is rendered. Nobody who writes data can know it."""
_ENVIRONMENT = _Environment(
    undefined=StrictUndefined, keep_trailing_newline=True, finalize=_written
)
_ENVIRONMENT.globals.clear()  # a name is a column, even if jinja has something of that name
del _ENVIRONMENT.filters["random"]
_ENVIRONMENT.filters |= {name: _listed(each) for name, each in _ENVIRONMENT.filters.items()}
_HERE_AND_NOW = ("now", "today", "utcnow", "astimezone", "timestamp", "fromtimestamp")
"""Methods of times that ask the clock or the zone of the machine."""
_WORDS = ("self", "none", "true", "false")
"""What a template cannot read of a row: jinja takes these names for its own."""
_AROUND_DOCUMENT = (nodes.Output, nodes.If, nodes.For, nodes.With)
"""What `{{ document }}` may stand in: none of them looks at what is written."""
_PLACES = re.compile(r"\{\{\s*document\s*\}\}")
_ASKS = ("default", "d", "defined", "undefined")
"""Filters and tests of jinja2 for what may not be there."""
_SINGLE_BRACES = re.compile(r"(?<!\{)\{\s*(\w+)\s*\}(?!\})")


class Instruction:
    """A user message as a sandboxed jinja2 template: `{{ document }}`, and any other name for a
    column of the row.

    A message without `{{ document }}` has the document behind it, after a blank line. Raises
    ValueError, which begins with `key`, for what is no template, for a name in single braces, which
    would be read as text, and for the document in an expression, which would see what stands for
    it.
    """

    def __init__(self, key: str, source: str):
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
        _check_names(key, tree)
        self._made_of = key, source
        self.columns = tuple(sorted(names - {DOCUMENT}))
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

    def around(self, values: ReadOnly) -> Around:
        """Return the text before and behind the document. values: of a row's `columns`; null is an
        empty string.

        Raises DocumentError (`BadInstruction`, stage `prompt`) if they do not go into the template,
        or if it comes to more than one place for the document.
        """
        row = mended(values, decodes=True)
        try:
            text = self._template.render(row, **{DOCUMENT: _SENTINEL})
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


def _check_names(key: str, node: nodes.Node, *, sees: bool = False) -> None:
    """Raise ValueError for a word of jinja's in the place of a column, and for a document that is
    not just written.

    sees: the node stands in something that looks at what is written in it.
    """
    for child in node.iter_child_nodes():
        is_written = isinstance(node, nodes.Output)
        name = child.name if isinstance(child, nodes.Name) else None
        if is_written and isinstance(child, nodes.Const) and not isinstance(child.value, str):
            name = str(child.value).lower()
        if name in _WORDS:
            raise ValueError(
                f"{key} writes {name}, which is a word of jinja's and no column: rename the column"
            )
        if name == DOCUMENT and (sees or not is_written):
            raise ValueError(
                f"{key} uses {DOCUMENT} in an expression, which would not see its text: write "
                f"{PLACE} alone, outside of filters, conditions and macros"
            )
        _check_names(key, child, sees=sees or not isinstance(child, _AROUND_DOCUMENT))


def _paths(tree: nodes.Template) -> Iterator[tuple[str, ...]]:
    """Yield the fields that a template reads, but not those that it asks for, because they may not
    be there.
    """
    asked = [each.node for each in tree.find_all((nodes.Filter, nodes.Test)) if each.name in _ASKS]
    for node in tree.find_all((nodes.Getattr, nodes.Getitem)):
        if node not in asked and (path := _path(node)):
            yield path


def _path(node: nodes.Node) -> tuple[str, ...]:
    """Return the names in `a.b` or `a["b"]`; none for any other expression."""
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
    """Return the text before and behind the document of an instruction that is data: no template,
    only its place.

    Raises DocumentError (`BadInstruction`) for more than one place.
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
