"""Measured step costs on disk, in the user's cache folder: one file for each device and model.

A file that is missing, damaged or foreign is measured again, and one that cannot be written is done without.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from specextend.attention.plan import TreeAttention
from specextend.decoding.device import device_name
from specextend.decoding.model import CachedModel
from specextend.decoding.options import AttentionOptions, TreeOptions
from specextend.decoding.step_costs import CostTable, StepCosts
from specextend.decoding.tuning import Grid, make_grid, measure

VERSION = 1
_SHAPE = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)


def load_step_costs(
    target: CachedModel, tree: TreeOptions, attention: AttentionOptions, max_batch_size: int
) -> StepCosts | None:
    """What steps cost here, from an earlier start or measured now; None where nothing is chosen by it.

    Measuring writes to the target's cache, which must be in use by nobody.
    """
    fixed = tree.nodes != "auto"
    if fixed and attention.tree != "auto":
        return None
    kinds: tuple[TreeAttention, ...] = ("dense", "hybrid") if attention.tree == "auto" else (attention.tree,)
    room = target.cache.rows.num_free
    grid = make_grid(kinds, tree.most_nodes, fixed=fixed, max_batch_size=max_batch_size, room=room)
    key = describe(target)
    table = read_table(key, grid)
    if table is None:
        table, is_quiet = measure(target, grid)
        if is_quiet:
            write_table(key, grid, table)
    return StepCosts(table)


def describe(target: CachedModel) -> dict[str, Any]:
    """All that a step's time depends on, as JSON values: the device and its software, the model's shape."""
    return {
        "device": device_name(target.device),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "dtype": str(target.dtype),
        "backend": target.attend.__module__,
        "head_dim": target.head_dim,
        **{name: getattr(target.config, name) for name in _SHAPE},
    }


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/specextend` or `~/.cache/specextend`; None where there is no home either."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(base):  # the standard has relative ones ignored
        return Path(base, "specextend")
    home = os.path.expanduser("~")
    return Path(home, ".cache", "specextend") if os.path.isabs(home) else None


def read_table(key: Mapping[str, Any], grid: Grid) -> CostTable | None:
    """The table kept for `key` (JSON values that name device and model) and `grid`; None where none can be used."""
    path = _path(key, grid)
    if path is None:
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION or stored["key"] != _full_key(key, grid):
            return None
        return CostTable(
            {kind: {size: _line(stored["lines"][kind][str(size)]) for size in grid.sizes} for kind in grid.kinds}
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_table(key: Mapping[str, Any], grid: Grid, table: CostTable) -> bool:
    """Keep a table; False where the folder cannot be written."""
    path = _path(key, grid)
    if path is None:
        return False
    values = {"version": VERSION, "key": _full_key(key, grid), "lines": table.lines}
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text(json.dumps(values, indent=1), encoding="utf-8")
        os.replace(temporary, path)
    except OSError:
        with suppress(OSError):
            temporary.unlink()
        return False
    return True


def _full_key(key: Mapping[str, Any], grid: Grid) -> dict[str, Any]:
    return {**key, "kinds": [*grid.kinds], "sizes": [*grid.sizes], "lengths": [*grid.lengths]}


def _path(key: Mapping[str, Any], grid: Grid) -> Path | None:
    folder = cache_folder()
    text = json.dumps(_full_key(key, grid), sort_keys=True)
    return folder and folder / f"step-costs-{hashlib.sha256(text.encode()).hexdigest()[:16]}.json"


def _line(values: Any) -> tuple[float, float]:
    constant, slope = (float(value) for value in values)
    if not (0 <= constant < math.inf and 0 <= slope < math.inf and constant + slope > 0):
        raise ValueError(f"no line: {values}")
    return constant, slope
