"""Documents from requests in the input format of OpenAI's Batch API.

Options that a run has only once, such as the system message, must be equal in all requests.
"""

import json
import shlex
from collections.abc import Collection, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import ReadOnly, Values
from specextend.data.inputs import InputError
from specextend.data.parquet import SEALED
from specextend.data.storage import atomic_output, is_folder, resolve
from specextend.documents.table_rows import json_value
from specextend.documents.text import UnreadableError

_COLUMNS = pa.schema([("id", "string"), ("text", "string"), ("max_new_tokens", "int32")])
_GROUP_ROWS = 64
URL = "/v1/chat/completions"
_SHARED = ("temperature", "top_p", "seed", "stop")
_MODEL = "body.model"
_LIMITS = ("max_tokens", "max_completion_tokens")
_OWN = ("model", "messages", *_LIMITS)
_ALWAYS: Values = {
    "input.id_column": "id",
    "input.passthrough": [],
    "input.options_column": "max_new_tokens",
    "prompt.instruction": "{{ document }}",
}


class BatchRequests:
    """Documents of a file of requests. Iterate once, then read `settings`."""

    def __init__(self, path: Path):
        self._path = path
        self._shared: Values | None = None
        self._lines: dict[str, int] = {}

    def __iter__(self) -> Iterator[Values]:
        """Yield documents with `id`, `text` and `max_new_tokens` (None without a limit).

        Raises:
            InputError: A request cannot be served; the message names its line.
        """
        try:
            with self._path.open(encoding="utf-8") as file:
                for number, line in enumerate(file, start=1):
                    if line.strip():
                        yield self._read(number, line)
        except (OSError, UnicodeDecodeError) as error:
            raise InputError(f"{self._path} cannot be read: {error}") from error

    @property
    def settings(self) -> str:
        """Return arguments of `specextend run`, quoted for a shell."""
        settings = _ALWAYS | (self._shared or {})
        return " ".join(
            f"--set {shlex.quote(f'{name}={json.dumps(value)}')}"
            for name, value in settings.items()
            if value is not None and name != _MODEL
        )

    def _read(self, number: int, line: str) -> Values:
        try:
            return self._document(number, line)
        except (UnreadableError, ValueError) as error:
            raise InputError(f"{self._path.name}:{number} {error}") from error

    def _document(self, number: int, line: str) -> Values:
        values = _parse(line)
        body = values["body"]
        custom_id = values["custom_id"]
        system, text = _messages(body.get("messages"))
        stop = body.get("stop")
        shared = {f"decoding.{name}": body.get(name) for name in _SHARED}
        shared |= {
            _MODEL: body.get("model"),
            "prompt.system": system,
            "decoding.stop": [stop] if isinstance(stop, str) else stop,
        }
        if self._shared is None:
            self._shared = shared
        for name, value in shared.items():
            if value != self._shared[name]:
                raise ValueError(
                    f"differs in what a run has only once: {name} would be {value!r} here and is "
                    f"{self._shared[name]!r} in the first request (line "
                    f"{min(self._lines.values())}); put such requests into files of their own"
                )
        limit = _limit(body)
        # responses have no other name
        if (first := self._lines.setdefault(custom_id, number)) != number:
            raise ValueError(
                f"has the custom_id {custom_id!r} of line {first}; make them different"
            )
        return {"id": custom_id, "text": text, "max_new_tokens": limit}


def _limit(body: ReadOnly) -> int | None:
    given = [body[name] for name in _LIMITS if body.get(name) is not None]
    for limit in given:
        if type(limit) is not int or limit < 1:
            raise ValueError(f"has body.max_tokens {limit!r}; make it a whole number from 1")
    if given and min(given) < max(given):
        raise ValueError(f"has {' and '.join(_LIMITS)} that differ; leave one of them out")
    return given[0] if given else None


def _parse(line: str) -> Values:
    values = json_value(line)
    custom_id = values.get("custom_id") if isinstance(values, dict) else None
    if not isinstance(custom_id, str) or not custom_id:
        raise ValueError("has no custom_id; every request needs one, a string")
    if (values.get("method"), values.get("url")) != ("POST", URL):
        raise ValueError(f"is not served: method and url must be POST and {URL}")
    if not isinstance(values.get("body"), dict):
        raise ValueError("has no body; it holds the messages")
    _check_keys("the request", values, {"custom_id", "method", "url", "body"})
    _check_keys("body", values["body"], {*_OWN, *_SHARED})
    return dict(values)


def _check_keys(what: str, values: ReadOnly, known: Collection[str]) -> None:
    if unknown := values.keys() - known:
        raise ValueError(f"has {min(unknown)!r} in {what}, which is not served; remove it")


def _messages(messages: Any) -> tuple[str | None, str]:
    for message in messages if isinstance(messages, list) else ():
        if isinstance(message, dict):
            _check_keys("a message", message, {"role", "content"})
    match messages:
        case [{"role": "user", "content": content}]:
            return None, _text(content)
        case [
            {"role": "system" | "developer", "content": system},
            {"role": "user", "content": content},
        ]:
            return _text(system), _text(content)
    raise ValueError(
        "has other body.messages than one from the user, behind at most one from the system; "
        "make it so"
    )


def _text(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts: list[Any] = content if isinstance(content, list) else [None]
    texts = []
    for part in parts:
        match part:
            case {"type": "text", "text": str(text)}:
                _check_keys("a part of a message", part, {"type", "text"})
                texts.append(text)
            case _:
                raise ValueError("has a message that is no text; images and sounds are not served")
    return "".join(texts)


def write_requests(requests: Iterable[Values], output: str, limit: int | None = None) -> int:
    """Write requests as one Parquet file, whole or not at all; return their number.

    Raises InputError without requests, or if `output` is a folder.
    """
    place = resolve(output)
    written = 0
    rows = islice(requests, limit)
    if is_folder(place):
        raise InputError(
            f"{output} is a folder; name the file to write, such as {output}/requests.parquet"
        )
    with atomic_output(place) as path, pq.ParquetWriter(path, _COLUMNS, **SEALED) as writer:
        while group := list(islice(rows, _GROUP_ROWS)):
            writer.write_table(pa.Table.from_pylist(group, schema=_COLUMNS))
            written += len(group)
        if not written:
            raise InputError("there are no requests to write; give a file that has some")
    return written
