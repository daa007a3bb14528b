"""Documents from requests in the input format of OpenAI's Batch API.

Options that a run has only once, such as the system message, must be equal in all requests.
"""

import json
import shlex
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, ConfigDict, Field, PositiveInt, ValidationError, field_validator

from specextend.core import Values
from specextend.data.inputs import InputError
from specextend.data.parquet import SEALED
from specextend.data.storage import atomic_output, is_folder, resolve
from specextend.documents.table_rows import json_value
from specextend.documents.text import UnreadableError

_COLUMNS = pa.schema([("id", "string"), ("text", "string"), ("max_new_tokens", "int32")])
_GROUP_ROWS = 64
_SHARED = ("temperature", "top_p", "seed")
_MODEL = "body.model"
_ALWAYS: Values = {
    "input.id_column": "id",
    "input.passthrough": [],
    "input.options_column": "max_new_tokens",
    "prompt.instruction": "{{ document }}",
}


class _Served(BaseModel):
    """A part of a request. Other fields are refused: they would be ignored."""

    model_config = ConfigDict(extra="forbid", strict=True)


class _Part(_Served):
    type: Literal["text"]
    text: str


class _Message(_Served):
    role: Literal["system", "developer", "user"]
    content: list[_Part]

    @field_validator("content", mode="before")
    @classmethod
    def _in_parts(cls, content: Any) -> Any:
        return [{"type": "text", "text": content}] if isinstance(content, str) else content


class _Body(_Served):
    model: Any = None
    messages: list[_Message]
    max_tokens: PositiveInt | None = None
    max_completion_tokens: PositiveInt | None = None
    temperature: Any = None
    top_p: Any = None
    seed: Any = None
    stop: Any = None


class _Request(_Served):
    custom_id: str = Field(min_length=1)
    method: Literal["POST"]
    url: Literal["/v1/chat/completions"]
    body: _Body


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
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(map(str, first["loc"])) or "the line"
            raise InputError(
                f"{self._path.name}:{number} is not served: {place}: {first['msg']}"
            ) from error
        except (UnreadableError, ValueError) as error:
            raise InputError(f"{self._path.name}:{number} {error}") from error

    def _document(self, number: int, line: str) -> Values:
        request = _Request.model_validate(json_value(line))
        body = request.body
        texts = ["".join(part.text for part in each.content) for each in body.messages]
        if [each.role == "user" for each in body.messages] not in ([True], [False, True]):
            raise ValueError(
                "has other messages than one from the user, behind at most one from the system; "
                "make it so"
            )
        limits = {*filter(None, (body.max_tokens, body.max_completion_tokens))}
        if len(limits) > 1:
            raise ValueError(
                "has max_tokens and max_completion_tokens that differ; leave one of them out"
            )
        shared = {f"decoding.{name}": getattr(body, name) for name in _SHARED} | {
            _MODEL: body.model,
            "prompt.system": texts[0] if len(texts) > 1 else None,
            "decoding.stop": [body.stop] if isinstance(body.stop, str) else body.stop,
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
        # responses have no other name
        if (first := self._lines.setdefault(request.custom_id, number)) != number:
            raise ValueError(
                f"has the custom_id {request.custom_id!r} of line {first}; make them different"
            )
        return {
            "id": request.custom_id,
            "text": texts[-1],
            "max_new_tokens": max(limits, default=None),
        }


def write_requests(requests: Iterable[Values], output: str, limit: int | None = None) -> int:
    """Write requests as one Parquet file, whole or not at all; return their number.

    Raises InputError without requests, or if `output` is a folder.
    """
    place = resolve(output)
    if is_folder(place):
        raise InputError(
            f"{output} is a folder; name the file to write, such as {output}/requests.parquet"
        )
    rows = [*islice(requests, limit)]
    if not rows:
        raise InputError("there are no requests to write; give a file that has some")
    table = pa.Table.from_pylist(rows, schema=_COLUMNS)
    with atomic_output(place) as path:
        pq.write_table(table, path, row_group_size=_GROUP_ROWS, **SEALED)
    return len(rows)
