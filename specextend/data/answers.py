"""Answers as data: the JSON Schema of `output.schema`, and columns from answers."""

import json
import re
import secrets
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa

from specextend.core import (
    Choice,
    ReadOnly,
    Values,
    did_you_mean,
    one_line,
    read_json,
    unique_fields,
)

_ARROW = {
    "string": pa.string(),
    "number": pa.float64(),
    "integer": pa.int64(),
    "boolean": pa.bool_(),
}
"""Column types by JSON Schema type."""
RULES = ("first", "union", "majority")
"""Rules of `merge_answers`."""
_NOTES = {"title", "description", "default", "examples", "merge", "type"}
"""Keywords that exclude no value of an `enum`."""
_LIMITING = {
    "properties", "required", "additionalProperties", "items", "prefixItems", "minItems",
    "maxItems", "uniqueItems", "minLength", "maxLength", "pattern", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "anyOf", "oneOf", "allOf",
    "patternProperties",
}  # fmt: skip
_ALIKE = 0.85
_LONG_TOKEN = 16
_LIMITS = (("minLength", "maxLength"), ("minItems", "maxItems"), ("minimum", "maximum"))
_EXACT = 1 << 53
"""Largest integer that every program reads exactly. The range also prevents endless digits."""
_PASSED_OVER = {
    "nullable": 'write type: [TYPE, "null"]',
    "x-nullable": 'write type: [TYPE, "null"]',
    "optional": "write the names of the other fields into required",
    "divisibleBy": "write multipleOf",
    "disallow": "write enum",
    "extends": "write all in one",
    "formatMinimum": "write pattern",
    "formatMaximum": "write pattern",
    "formatExclusiveMinimum": "write pattern",
    "formatExclusiveMaximum": "write pattern",
}
"""Keywords of other dialects, which grammars ignore, with replacements."""
_DECIMAL = secrets.token_hex(8)
"""Mark around numbers that no float holds, while JSON is written."""


def schema_of(given: str | ReadOnly) -> str:
    """Return the JSON Schema for `output.schema`.

    Objects are closed, and integers get a range that fits a column.

    Args:
        given: File name, mapping of names to types, or JSON text.

    Raises:
        ValueError: The schema is invalid, or a field (named) cannot be decoded or stored.
    """
    schema = _read(given) if isinstance(given, str) else dict(given)
    if not _is_object(schema):
        if not schema:
            raise ValueError("output.schema must name a field at least")
        fields = {name: _field(name, kind) for name, kind in schema.items()}
        schema = {"type": "object", "properties": fields, "required": [*fields]}
    schema = _bounded(schema)
    names = [*_properties(schema)]
    if alike := [
        name for name in names if [each.lower() for each in names].count(name.lower()) > 1
    ]:
        raise ValueError(
            f"output.schema: {' and '.join(alike)} differ in case alone, which many programs do "
            "not see"
        )
    needed = schema.get("required") if schema.get("additionalProperties") is False else None
    if (
        unknown := [name for name in needed if name not in names]
        if isinstance(needed, list)
        else []
    ):
        raise ValueError(
            f"output.schema: required names {unknown[0]}, which is no "
            f"field{did_you_mean(str(unknown[0]), names)}"
        )
    _check_keywords("", schema)
    for name, field in _properties(schema).items():
        kind = _arrow(name, field, schema)
        _check(f"field {name}", schema | {"properties": {name: field}, "required": [name]})
        if (rule := field.get("merge")) not in (None, *RULES):
            raise ValueError(
                f"output.schema: field {name}: merge must be {', '.join(RULES)}, got "
                f"{json.dumps(rule)}{did_you_mean(str(rule), RULES)}"
            )
        if rule == "union" and not pa.types.is_list(kind):
            raise ValueError(
                f"output.schema: field {name} is no list, which merge: union is for; use first or "
                "majority"
            )
    _check("the whole", schema)
    return _text(schema)


@lru_cache(maxsize=8)
def choices_of(schema: str | None) -> tuple[Choice, ...]:
    """Return the choices of a schema with known values only; () if anything must be written.

    The concatenated texts of the choices are an answer.
    """
    whole = {} if schema is None else json.loads(schema)
    fields = {name: _values(field, whole) for name, field in _properties(whole).items()}
    known = {"properties", "required", "additionalProperties", "$defs", "definitions", *_NOTES}
    others = whole.keys() - known
    if others or not all(fields.values()) or {*whole.get("required", ())} != {*fields}:
        return ()
    choices = []
    for number, (name, values) in enumerate(fields.items(), 1):
        begin = "{" if number == 1 else " "
        end = "}" if number == len(fields) else ","
        texts = tuple(f"{begin}{_text(name)}: {_text(value)}{end}" for value in values)
        choices.append(Choice(name, _shown(values), texts))
    return tuple(choices) if any(len(choice.values) > 1 for choice in choices) else ()


@lru_cache(maxsize=8)
def closed_fields(schema: str) -> tuple[Choice, ...]:
    """Return the fields with known values, and the JSON of each value."""
    whole = json.loads(schema)
    fields = {name: _values(field, whole) for name, field in _properties(whole).items()}
    return tuple(
        Choice(name, _shown(values), tuple(map(_text, values)))
        for name, values in fields.items()
        if values
    )


def _shown(values: Iterable[Any]) -> tuple[str, ...]:
    return tuple(value if isinstance(value, str) else _text(value) for value in values)


def _values(field: Any, whole: ReadOnly) -> list[Any]:
    """Return the distinct values of a field; [] if unknown."""
    others = {*field} - _NOTES if isinstance(field, Mapping) else set()
    match field:
        case {"$ref": str(place)}:
            values = _values(_at(place, whole), whole)
        case {"anyOf": list(kinds)} | {"oneOf": list(kinds)}:
            found = [_values(kind, whole) for kind in kinds]
            values = [value for values in found for value in values] if all(found) else []
        case {"enum": list(values)}:
            pass
        case {"const": value}:
            values = [value]
        case {"type": "boolean"} if not others:
            values = [True, False]
        case {"type": "null"} if not others:
            values = [None]
        case _:
            return []
    has_others = len(others) > 1  # besides the keyword with the values
    if has_others or any(_kind(value) != field.get("type", _kind(value)) for value in values):
        return []
    return _each_once(values)


def _each_once(values: Iterable[Any]) -> list[Any]:
    return list({_text(value): value for value in values}.values())


def _text(value: Any) -> str:
    def whole(number: Decimal) -> str:
        return f"{_DECIMAL}{number}{_DECIMAL}"

    text = json.dumps(value, ensure_ascii=False, default=whole)
    return re.sub(f'"{_DECIMAL}(.*?){_DECIMAL}"', r"\1", text)


def answer_fields(schema: str | None) -> list[pa.Field]:
    """Return the fields of a schema as columns."""
    whole = {} if schema is None else json.loads(schema)
    return [
        pa.field(name, _arrow(name, field, whole)) for name, field in _properties(whole).items()
    ]


def answer_columns(schema: str | None, texts: pa.ChunkedArray) -> list[pa.Array]:
    """Return the columns of `answer_fields`; null for texts that are no answers."""
    fields = answer_fields(schema)
    answers = [_parsed(text) or {} for text in texts.to_pylist()] if fields else []
    return [_column([answer.get(field.name) for answer in answers], field.type) for field in fields]


def free_fields(schema: str, *kinds: str) -> frozenset[str]:
    """Return the fields with free values of some types; inner fields are `outer.inner`."""
    whole = json.loads(schema)
    return frozenset(_free_fields("", whole, whole, kinds))


def has_rules(schema: str | None) -> bool:
    """Return True if a schema has rules for merging the answers to parts."""
    return schema is not None and any(
        "merge" in field for field in _properties(json.loads(schema)).values()
    )


def merge_answers(schema: str, texts: Sequence[str]) -> str:
    """Merge the answers to the parts of a document into one JSON text.

    `first` (the default) takes the first value that is neither null nor empty, `majority` the most
    frequent. `union` lists all distinct values.
    """
    answers = [read_json(text, parse_float=_number) for text in texts]
    merged = {}
    for name, field in _properties(json.loads(schema)).items():
        given = [answer[name] for answer in answers if name in answer]
        values = [value for value in given if value not in (None, "", [], {})]
        if field.get("merge") == "union":
            items = (each for value in values for each in value if each not in (None, ""))
            values = [_each_once(items)]
        elif field.get("merge") == "majority":
            values = sorted(values, key=lambda value: -values.count(value))
        if given:
            merged[name] = [*values, given[0]][0]
    return _text(merged)


def shortest_answer(schema: str) -> str:
    """Return a short answer to a schema, ignoring patterns and formats."""
    whole = json.loads(schema)
    return _text(_shortest(whole, whole))


def _shortest(field: Any, whole: ReadOnly) -> Any:
    answers = []
    for kind in _kinds(field, whole):
        answers += _values(kind, whole) or [_shortest_of_kind(kind, whole)]
    return min(answers, key=lambda answer: len(_text(answer)), default=0)


def _shortest_of_kind(field: Any, whole: ReadOnly) -> Any:
    match field:
        case {"type": "object"}:
            fields = _properties(field)
            return {
                name: _shortest(fields[name], whole)
                for name in field.get("required", ())
                if name in fields
            }
        case {"type": "array"}:
            return [_shortest(field.get("items"), whole)] * min(field.get("minItems", 0), 1 << 8)
        case {"type": "string"}:
            return "a" * min(field.get("minLength", 0) // _LONG_TOKEN, 1 << 12)
        case _:
            return 0


def _kinds(field: Any, whole: ReadOnly) -> list[Any]:
    match field:
        case {"type": "object"} if _properties(field):
            return [field]
        case {"type": list(kinds)}:
            return [dict(field) | {"type": kind} for kind in kinds]
        case {"$ref": str(place)}:
            return _kinds(_at(place, whole), whole)
        case {"anyOf": list(kinds)} | {"oneOf": list(kinds)}:
            return [each for kind in kinds for each in _kinds(kind, whole)]
    return [field]


def whole_answer(text: str) -> str | None:
    """Return a complete answer, with U+FFFD for lone surrogates in escapes; None if incomplete."""
    if _parsed(text) is None:
        return None
    answer = read_json(text, parse_float=_number)
    return text if answer == json.loads(text, parse_float=_number) else _text(answer)


def _column(values: list[Any], kind: pa.DataType) -> pa.Array:
    try:
        return pa.array([_fitted(value, kind) for value in values], kind)
    except (ValueError, TypeError, OverflowError):
        if len(values) == 1:
            return pa.nulls(1, kind)
        return pa.concat_arrays([_column([value], kind) for value in values])


def _parsed(text: str | None) -> Values | None:
    try:
        value = read_json(text or "", parse_float=_number)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def _number(digits: str) -> float | Decimal:
    number = float(digits)
    try:
        exact = Decimal(digits)
    except ArithmeticError:
        raise ValueError(f"{digits} is out of range") from None
    return number if Decimal(repr(number)) == exact else exact


def _fitted(value: Any, kind: pa.DataType) -> Any:
    if pa.types.is_list(kind) and isinstance(value, list):
        return [_fitted(each, kind.value_type) for each in value]
    if pa.types.is_struct(kind) and isinstance(value, dict):
        return {field.name: _fitted(value.get(field.name), field.type) for field in kind}
    if pa.types.is_floating(kind) and type(value) is int and float(value) == value:
        return float(value)
    is_broken = pa.types.is_integer(kind) and type(value) is float and value % 1
    if is_broken or isinstance(value, Decimal):
        raise ValueError(f"{value} does not fit into {kind}")
    return value


def _read(given: str) -> Values:
    is_text = given.startswith('{"')
    where = "output.schema" if is_text else f"output.schema {given}"
    try:
        schema = json.loads(
            given if is_text else Path(given).read_bytes(),
            parse_float=_number,
            object_pairs_hook=unique_fields,
        )
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{where} cannot be read as JSON: {one_line(error)}") from None
    if not _is_object(schema):
        raise ValueError(
            f'{where} must describe an object: {{"type": "object", "properties": ...}}'
        )
    return dict(schema)


def _is_object(schema: Any) -> bool:
    return (
        isinstance(schema, Mapping) and schema.get("type") == "object" and bool(_properties(schema))
    )


def _properties(schema: ReadOnly) -> ReadOnly:
    found = schema.get("properties")
    return found if isinstance(found, Mapping) else {}


def _field(name: str, kind: Any) -> ReadOnly:
    match kind:
        case {} if (_LIMITING | _NOTES | {"enum", "const", "$ref"}) & {*kind} or not any(
            isinstance(each, str | list) for each in kind.values()
        ):
            return dict(kind)
        case [item]:
            return {"type": "array", "items": _field(name, item)}
        case str() if kind.endswith("?"):
            return {"anyOf": [_field(name, kind.removesuffix("?")), {"type": "null"}]}
        case str() if kind in _ARROW:
            return {"type": kind}
        case str() if "|" in kind and not {*_words(kind)} & {*_ARROW, "null", ""}:
            return {"enum": _words(kind)}
    if isinstance(kind, Mapping) and "type" not in kind:
        raise ValueError(
            f"output.schema.{name}: write an object inside another one as JSON Schema: "
            "{type: object, properties: {NAME: {type: string}}, required: [NAME]}"
        )
    raise ValueError(
        f"output.schema.{name} must be {', '.join(_ARROW)}, values as in `a | b`, a list of one of "
        "these as in [string], or a JSON Schema; with a ? behind it, it may be null; got "
        f"{json.dumps(kind)}{did_you_mean(str(kind), _ARROW)}"
    )


def _words(kind: str) -> list[str]:
    return [word.strip() for word in kind.split("|")]


def _bounded(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_bounded(each) for each in schema]
    if isinstance(schema, Decimal | int | float) and not _is_exact(schema):
        raise ValueError(
            f"output.schema: {schema} is not decoded exactly, as numbers are up to {_EXACT} and "
            "with up to 17 digits: make its field a string, or leave out the limit"
        )
    if not isinstance(schema, Mapping):
        return schema
    bounded = {name: _bounded(each) for name, each in schema.items()}
    kinds = schema.get("type")
    if kinds == "object":
        bounded.setdefault("additionalProperties", False)
    if kinds == "integer" or (isinstance(kinds, list) and "integer" in kinds):
        bounded = {"minimum": -_EXACT, "maximum": _EXACT} | bounded
    return bounded


def _is_exact(number: Decimal | int | float) -> bool:
    return not isinstance(number, Decimal) and abs(number) <= _EXACT


def _arrow(name: str, schema: Any, whole: ReadOnly, within: tuple[str, ...] = ()) -> pa.DataType:
    match schema:
        case {"$ref": str(place)}:
            if place in within:
                raise ValueError(
                    f"output.schema: field {name} contains itself ({place}), which no column can "
                    "hold"
                )
            if _at(place, whole) is None:
                raise ValueError(f"output.schema: field {name}: there is no {place}")
            return _arrow(name, _at(place, whole), whole, (*within, place))
        case {"anyOf": list(choices)} | {"oneOf": list(choices)}:
            pass
        case {"enum": list(values)}:
            choices = [{"type": _kind(value)} for value in values]
        case {"const": value}:
            choices = [{"type": _kind(value)}]
        case {"type": list(kinds)}:
            choices = [dict(schema) | {"type": kind} for kind in kinds]
        case {"type": "array", "items": items}:
            return pa.list_(_arrow(name, items, whole, within))
        case {"type": "object"} if _properties(schema):
            inner = _properties(schema).items()
            return pa.struct(
                [(key, _arrow(f"{name}.{key}", each, whole, within)) for key, each in inner]
            )
        case {"type": str(kind)} if kind in _ARROW:
            return _ARROW[kind]
        case {"type": str(kind)} if kind not in ("array", "object", "null"):
            raise ValueError(
                f"output.schema: field {name}: there is no type "
                f"{kind}{did_you_mean(str(kind), _ARROW)}"
            )
        case _:
            choices = []
    found = {
        _arrow(name, each, whole, within)
        for each in choices
        if not (isinstance(each, Mapping) and each.get("type") == "null")
    }
    if found == {pa.int64(), pa.float64()}:
        return pa.float64()
    if len(found) != 1:
        raise ValueError(
            f"output.schema: field {name} must have one type, which a column can hold: "
            f"{', '.join(_ARROW)}, an array "
            f"with `items`, or an object with `properties`; got {json.dumps(schema)}"
        )
    return found.pop()


def _check_keywords(name: str, field: Any) -> None:
    if isinstance(field, list):
        for each in field:
            _check_keywords(name, each)
    if not isinstance(field, Mapping):
        return
    for keyword, value in field.items():
        if keyword in _PASSED_OVER and value is not False:
            raise ValueError(
                f"output.schema: field {name}: {keyword} is no keyword of JSON Schema, and would "
                f"be passed over: {_PASSED_OVER[keyword]}"
            )
        if keyword in ("exclusiveMinimum", "exclusiveMaximum", "required") and type(value) is bool:
            raise ValueError(
                f"output.schema: field {name}: {keyword} must be "
                f"{'a list of names' if keyword == 'required' else 'a number'}, as JSON Schema has "
                f"it since 2013, got {_text(value)}"
            )
        if near := did_you_mean(str(keyword), () if keyword in _LIMITING else _LIMITING, _ALIKE):
            raise ValueError(
                f"output.schema: field {name}: {keyword} is no keyword of JSON Schema{near}"
            )
    for low, high in _LIMITS:
        least = field.get(low)
        most = field.get(high)
        if isinstance(least, int | float) and isinstance(most, int | float) and least > most:
            raise ValueError(f"output.schema: field {name}: {low} {least} is above {high} {most}")
    for key, each in _properties(field).items():
        _check_keywords(f"{name}.{key}" if name else key, each)
    for keyword in ("$defs", "definitions"):
        for key, each in dict(field.get(keyword) or {}).items():
            _check_keywords(key, each)
    for keyword in ("items", "prefixItems", "additionalProperties", "anyOf", "oneOf", "allOf"):
        _check_keywords(name, field.get(keyword))


def _free_fields(name: str, schema: Any, whole: ReadOnly, kinds: Collection[str]) -> Iterator[str]:
    for kind in _kinds(schema, whole):
        match kind:
            case {"enum": _} | {"const": _}:
                pass
            case {"type": str(type_)} if type_ in kinds:
                yield name
            case {"type": "array", "items": items}:
                yield from _free_fields(name, items, whole, kinds)
            case {"type": "object"}:
                for key, each in _properties(kind).items():
                    yield from _free_fields(f"{name}.{key}" if name else key, each, whole, kinds)


def _kind(value: Any) -> str:
    names = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
    return names.get(type(value), type(value).__name__)


def _at(place: str, whole: ReadOnly) -> Any:
    found: Any = whole
    for key in place.removeprefix("#").split("/")[1:]:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def _check(what: str, schema: ReadOnly) -> None:
    from llguidance import LLMatcher

    is_wrong, said = LLMatcher.validate_grammar_with_warnings(
        LLMatcher.grammar_from_json_schema(dict(schema))
    )
    if is_wrong or said:
        raise ValueError(f"output.schema: {what} cannot be decoded: {' '.join(said[0].split())}")
