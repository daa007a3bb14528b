"""A filter in text: a small grammar of comparisons over columns, which is parsed and never executed as Python."""

import ast
import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any, TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from specextend.core import one_line
from specextend.data.parquet import is_text, plain_text

GRAMMAR = (
    "comparisons of columns with values (==, !=, <, <=, >, >=, in [...], not in [...], is null, is not null), joined "
    'by and, or, not; col("a b") names a column with spaces, a.b a field of a struct'
)
Values: TypeAlias = Any
"""A `pa.ChunkedArray`, or a `pa.Scalar` that the filter writes out."""
_COMPARE: Mapping[type[ast.cmpop], Callable[..., Values]] = {
    ast.Eq: pc.equal,
    ast.NotEq: pc.not_equal,
    ast.Lt: pc.less,
    ast.LtE: pc.less_equal,
    ast.Gt: pc.greater,
    ast.GtE: pc.greater_equal,
}


class RowFilter:
    """Chooses rows of tables. Raises ValueError, in one line, for text that is not of the grammar."""

    def __init__(self, text: str) -> None:
        self.text = text
        try:
            self._tree = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            reason = error.msg if isinstance(error, SyntaxError) else one_line(error)
            raise ValueError(f"input.filter {text!r} cannot be parsed ({reason}); it takes {GRAMMAR}") from None
        self.columns = tuple(dict.fromkeys(_columns(self._tree, text)))
        """The columns that it reads."""

    def mask(self, table: pa.Table) -> NDArray[np.bool_]:
        """Return [N] bool: True where a row matches; a comparison with null does not. Raises ValueError.

        That is for a comparison of types that cannot be compared, and for a filter that is neither true nor false.
        """
        try:
            found = _evaluate(self._tree, table)
            if not isinstance(found, pa.ChunkedArray) or not pa.types.is_boolean(found.type):
                raise pa.ArrowInvalid("it is neither true nor false")
        except (pa.ArrowException, TypeError, OverflowError) as error:
            types = ", ".join(f"{name} is {table.schema.field(name).type}" for name in self.columns) or "it names none"
            zone = "" if "zone offset" not in str(error) else ", and a time as '2026-11-23T22:00:00Z', with its zone"
            raise ValueError(
                f"input.filter {self.text!r} does not fit its columns ({one_line(error)}); {types}: write strings and "
                f"dates in quotes{zone}, numbers without, and a Boolean column as its name alone"
            ) from error
        return np.asarray(pc.fill_null(found, False).to_numpy(), bool)


def _columns(node: ast.expr, text: str) -> list[str]:
    """List the columns below a node. Raises ValueError for anything that the grammar does not have."""
    match node:
        case ast.BoolOp(values=parts):
            return [name for part in parts for name in _columns(part, text)]
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return _columns(part, text)
        case ast.Compare(left=left, ops=ops, comparators=rights) if all(map(_fits, ops, rights)):
            return [name for part in (left, *rights) for name in _columns(part, text)]
        case _ if (name := _column(node)) is not None:
            return [name]
        case _ if _is_value(node):
            return []
    raise ValueError(f"input.filter {text!r} has {ast.unparse(node)!r}, which is not allowed; it takes {GRAMMAR}")


def _fits(op: ast.cmpop, right: ast.expr) -> bool:
    """Return True if a comparison's right side has the form that its operator takes."""
    if isinstance(op, ast.Is | ast.IsNot):
        return _is_null(right)
    if isinstance(op, ast.In | ast.NotIn):
        return isinstance(right, ast.List | ast.Tuple) and bool(right.elts)
    return not isinstance(right, ast.List | ast.Tuple) and not _is_null(right)


def _column(node: ast.expr) -> str | None:
    """Return the name of a column, or of the one that a field is in; None for any other node."""
    match node:
        case ast.Name(id=name) if name != "null":
            return name
        case ast.Attribute(value=struct):
            return _column(struct)
        case ast.Call(func=ast.Name(id="col"), args=[ast.Constant(value=str(name))], keywords=[]):
            return name
    return None


def _is_null(node: ast.expr) -> bool:
    return (isinstance(node, ast.Name) and node.id == "null") or (isinstance(node, ast.Constant) and node.value is None)


def _is_value(node: ast.expr) -> bool:
    if isinstance(node, ast.List | ast.Tuple):
        return all(not isinstance(part, ast.List | ast.Tuple) and _is_value(part) for part in node.elts)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        node = node.operand
    return _is_null(node) or (isinstance(node, ast.Constant) and isinstance(node.value, str | int | float))


def _evaluate(node: ast.expr, table: pa.Table) -> Values:
    match node:
        case ast.BoolOp(op=op, values=parts):
            join = pc.and_kleene if isinstance(op, ast.And) else pc.or_kleene
            return reduce(join, (_evaluate(part, table) for part in parts))
        case ast.UnaryOp(op=ast.Not(), operand=part):
            return pc.invert(_evaluate(part, table))
        case ast.Compare(left=left, ops=ops, comparators=rights):
            pairs = zip([left, *rights], ops, rights, strict=False)
            return reduce(pc.and_kleene, (_compare(*pair, table) for pair in pairs))
    return pa.scalar(_value(node)) if _column(node) is None else _plain(_read(node, table))


def _read(node: ast.expr, table: pa.Table) -> pa.ChunkedArray:
    """Return the values of a column, or of a field of a struct."""
    if isinstance(node, ast.Attribute):
        return pc.struct_field(_read(node.value, table), node.attr)
    return table[_column(node)]


def _compare(left: ast.expr, op: ast.cmpop, right: ast.expr, table: pa.Table) -> Values:
    values = _evaluate(left, table)
    if isinstance(op, ast.Is | ast.IsNot):
        return (pc.is_null if isinstance(op, ast.Is) else pc.is_valid)(values)
    if isinstance(op, ast.In | ast.NotIn):
        wanted = [item for item in _value(right) if item is not None]
        value_set = pa.array(wanted)
        if is_text(values.type) != is_text(value_set.type) and not pa.types.is_temporal(values.type):
            raise pa.ArrowInvalid(f"{values.type} is none of {value_set.type}")
        found = pc.is_in(values, value_set=value_set.cast(values.type))
        found = pc.if_else(pc.is_valid(values), found, pa.scalar(None, pa.bool_()))
        return found if isinstance(op, ast.In) else pc.invert(found)
    other = _evaluate(right, table)
    return _COMPARE[type(op)](_as_time(values, other), _as_time(other, values))


def _value(node: ast.expr) -> Any:
    """Return the value that a node writes out."""
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(part) for part in node.elts]
    if isinstance(node, ast.UnaryOp):
        return operator.neg(_value(node.operand))
    return node.value if isinstance(node, ast.Constant) else None


def _plain(values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Give a column a type that Arrow compares: no dictionary, no string view, and UUIDs as they are written."""
    if pa.types.is_dictionary(values.type):
        values = values.cast(values.type.value_type)
    if isinstance(values.type, pa.UuidType):
        return plain_text(values)
    return values.cast(pa.large_string()) if is_text(values.type) else values


def _as_time(values: Values, other: Values) -> Values:
    """Read written text as a date or a time if it is compared with one."""
    is_written = isinstance(values, pa.Scalar) and is_text(values.type)
    return values.cast(other.type) if is_written and pa.types.is_temporal(other.type) else values
