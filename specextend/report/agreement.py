"""Figures of the audit: do summaries agree with plain decoding, and how much faster was speculation on this corpus?"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from specextend.stats import ratio

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Gap in logits, by the target's dtype, up to which a difference is one of rounding (`docs/log.md`)."""
MOST_EXAMPLES = 5


def audit_figures(rows: pa.Table, dtype: str) -> dict[str, Any] | None:
    """Compute the figures from rows of AUDIT_SCHEMA; None if nothing was audited.

    A document counts once, however often it was audited. The speed-up is that of the documents in batches as large as
    the job's, because a smaller batch of plain decoding pays more for each token.
    """
    rows = _one_of_each(rows)
    if not len(rows):
        return None
    compared = rows.filter(rows["error"].is_null())
    gaps = compared.filter(compared["gap"].is_valid())
    is_tie = pc.less_equal(gaps["gap"], NEAR_TIES[dtype])
    different = gaps.filter(pc.invert(is_tie))
    equal, tokens = _sum(compared["num_equal_tokens"]), _sum(compared["num_tokens"])
    return {
        "documents": len(rows),
        "failed": len(rows) - len(compared),
        "equal": len(compared) - len(gaps),
        "near_ties": len(gaps) - len(different),
        "different": len(different),
        "different_doc_ids": different["doc_id"].to_pylist()[:MOST_EXAMPLES],
        "near_tie_gap": NEAR_TIES[dtype],
        "largest_gap": pc.max(gaps["gap"]).as_py(),
        "token_agreement": ratio(equal, tokens),
        "seconds": _sum(rows["plain_prefill_s"]) + _sum(rows["plain_s"]),
        "speedup": _speedup(compared),
    }


def audit_seconds(rows: pa.Table) -> dict[str, float]:
    """Add up the seconds of plain decoding by start, from rows of AUDIT_SCHEMA."""
    seconds = pc.add(rows["plain_prefill_s"].fill_null(0), rows["plain_s"].fill_null(0))
    sums = pa.table({"run_id": rows["run_id"], "s": seconds}).group_by("run_id").aggregate([("s", "sum")])
    return dict(zip(sums["run_id"].to_pylist(), sums["s_sum"].to_pylist(), strict=True))


def _speedup(rows: pa.Table) -> dict[str, Any] | None:
    """Compare seconds per token with and without a draft, summed over documents of two tokens or more."""
    several = pc.and_(pc.greater(rows["num_tokens"], 1), pc.greater(rows["num_plain_tokens"], 1))
    rows = rows.filter(pc.and_(several, rows["is_full_batch"]))
    if not len(rows):
        return None
    sides = {
        "speculative": (rows["num_tokens"], rows["speculative_s"], rows["prefill_s"]),
        "plain": (rows["num_plain_tokens"], rows["plain_s"], rows["plain_prefill_s"]),
    }
    decode, whole = {}, {}
    for name, (tokens, seconds, prefill) in sides.items():
        decode[name] = _sum(seconds) / (_sum(tokens) - len(rows))
        whole[name] = (_sum(seconds) + _sum(prefill)) / _sum(tokens)
    return {
        "documents": len(rows),
        "batch_size": rows["batch_size"][0].as_py(),
        "decode": ratio(decode["plain"], decode["speculative"]),
        "end_to_end": ratio(whole["plain"], whole["speculative"]),
    }


def _one_of_each(rows: pa.Table) -> pa.Table:
    keys = zip(rows["file"].to_pylist(), rows["row"].to_pylist(), strict=True)
    places = {key: place for place, key in enumerate(keys)}
    return rows.take(pa.array(np.array(sorted(places.values()), np.int64)))


def _sum(column: pa.ChunkedArray) -> float:
    return pc.sum(column).as_py() or 0
