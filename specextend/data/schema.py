"""The output's columns, written once."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pyarrow as pa

from specextend.core import Completion, DocumentKey
from specextend.data.prompts import Prompt

SUMMARY_SCHEMA: pa.Schema = pa.schema([])
"""Our columns of `summaries/`; passthrough columns follow them."""
ERROR_SCHEMA: pa.Schema = pa.schema([])
"""Columns of `errors/`."""
PART_SCHEMA: pa.Schema = pa.schema([])
"""Columns of `_run/parts/`: the key, the summary columns, the error columns."""


def result_row(
    key: DocumentKey, doc_id: str, completion: Completion, prompt: Prompt, *, queue_s: float, worker: str, attempts: int
) -> dict[str, Any]:
    """A document done, as a row of a part."""
    raise NotImplementedError


def error_row(
    key: DocumentKey, doc_id: str, *, error_class: str, message: str, stage: str, retryable: bool, attempts: int
) -> dict[str, Any]:
    """A document given up, as a row of a part. stage: `read`, `prompt`, `decode`, ... what it died in."""
    raise NotImplementedError


def summary_schema(passthrough: Iterable[pa.Field]) -> pa.Schema:
    """The schema of a run's summaries."""
    raise NotImplementedError
