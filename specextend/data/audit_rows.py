"""The rows of the audit: how far plain decoding chose the tokens of a summary, and in how much time.

They are commits of the driver in `_run/audits/`, beside those of the results, and not needed to resume a run.
"""

from collections.abc import Sequence

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.core import Completion, DocumentKey, ReadOnly, Values
from specextend.data.commits import DamagedCommitError
from specextend.data.parquet import CHECKED, damaged_as, read_file, write_table
from specextend.data.run_folder import audits_folder
from specextend.data.schema import rows_table
from specextend.data.storage import Location, file_sizes, in_order

AUDIT_SCHEMA = pa.schema(
    [
        ("file", pa.int32()),
        ("row", pa.int64()),
        ("doc_id", pa.string()),
        ("run_id", pa.string()),
        ("num_tokens", pa.int32()),
        ("num_equal_tokens", pa.int32()),
        ("gap", pa.float64()),
        ("batch_size", pa.int32()),
        ("is_full_batch", pa.bool_()),
        ("prefill_s", pa.float64()),
        ("speculative_s", pa.float64()),
        ("num_plain_tokens", pa.int32()),
        ("plain_prefill_s", pa.float64()),
        ("plain_s", pa.float64()),
        ("error", pa.string()),
    ]
)
"""A row for each audited document; `run_id` is that of the start.

`gap` is null without a difference; with an `error`, what was not measured is null. Seconds are those of the engine, in
which the steps of a batch are divided among its sequences: `speculative_s` is all that the document's decoding took
after prefill, the draft's prefill included; `plain_s` the same without a draft.
"""


def audit_row(
    key: DocumentKey, doc_id: str, completion: Completion, plain: Completion | None, error: str = ""
) -> Values:
    """Make the row of a document, its batch left out, from its result and from the plain decoding.

    plain: None if it failed.
    """
    row: Values = {
        "file": key.file,
        "row": key.row,
        "doc_id": doc_id,
        "num_tokens": len(completion.token_ids),
        "prefill_s": completion.stats.prefill_s,
        "speculative_s": _decode_s(completion),
        "error": error or None,
    }
    if plain is not None:
        assert plain.agreement is not None, "a plain decoding compares"
        if completion.stats.num_cached_tokens > plain.stats.num_cached_tokens:
            row["prefill_s"] = plain.stats.prefill_s  # a prompt read whole is set beside one read whole
        row |= {
            "num_equal_tokens": plain.agreement.num_equal_tokens,
            "gap": plain.agreement.gap,
            "num_plain_tokens": len(plain.token_ids),
            "plain_prefill_s": plain.stats.prefill_s,
            "plain_s": _decode_s(plain),
        }
    return row


def _decode_s(completion: Completion) -> float:
    return completion.stats.draft_prefill_s + completion.stats.step_s


class AuditWriter:
    """Commits rows of `audit_row` to `_run/audits/audit-<run id>-<seq>.parquet`; one writer per start of a run."""

    def __init__(self, output: Location, run_id: str):
        self._folder, self._run_id, self._next_seq = audits_folder(output), run_id, 0

    def commit(self, rows: Sequence[ReadOnly]) -> None:
        """Write rows, whole or not at all; the column `run_id` is filled in."""
        if rows:
            table = rows_table([{**row, "run_id": self._run_id} for row in rows], AUDIT_SCHEMA)
            write_table(self._folder.child(f"audit-{self._run_id}-{self._next_seq:06d}.parquet"), table)
            self._next_seq += 1


def read_audits(output: Location) -> pa.Table:
    """Read the rows of all starts; none if nothing was audited. Raises DamagedCommitError, and OSError."""
    folder = audits_folder(output)
    sizes = file_sizes(folder)

    def table(file: pa.NativeFile) -> pa.Table:
        return pq.read_table(file, **CHECKED).select(AUDIT_SCHEMA.names).cast(AUDIT_SCHEMA)

    def read(name: str) -> pa.Table:
        file = folder.child(name)
        return read_file(
            file, table, damaged_as(DamagedCommitError, file, "move it away to do without its rows"), sizes[name]
        )

    names = sorted(name for name in sizes if name.endswith(".parquet"))
    return pa.concat_tables([AUDIT_SCHEMA.empty_table(), *in_order(read, names)])
