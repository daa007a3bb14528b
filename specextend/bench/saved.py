"""Figures that a benchmark wrote, read again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def read_figures(path: str) -> dict[str, Any]:
    """A file of figures as `jobs/bench.py` writes them. Raises ValueError for another one, OSError for none."""
    try:
        result = json.loads(Path(path).read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path} holds no JSON: {error}") from None
    if not isinstance(result, dict) or not isinstance(result.get("kind"), str):
        raise ValueError(f"{path} holds no figures of a benchmark: it names no kind")
    return result
