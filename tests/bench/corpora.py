"""The shipped documents, and the target whose tokens they are counted in."""

from __future__ import annotations

from pathlib import Path

import pyarrow.parquet as pq

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".models/SmolLM2-135M-Instruct"


def texts(name: str, longest: int) -> list[str]:
    """The texts of `examples/<name>.parquet` in the length buckets up to `longest` tokens."""
    rows = pq.read_table(ROOT / "examples" / f"{name}.parquet").to_pylist()
    return [row["text"] for row in rows if row["length_bucket"] <= longest]
