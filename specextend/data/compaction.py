"""Merging of small parts: neighbouring commits become one file, and no row is lost or counted twice meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from specextend.data.fingerprint import read_manifest
from specextend.data.in_order import in_order
from specextend.data.parts import ORIGIN, ORIGIN_SCHEMA, part_metadata, part_sizes, read_part, run_id_of
from specextend.data.provenance import provenance
from specextend.data.results import latest
from specextend.data.run_folder import parts_folder, read_starts
from specextend.data.schema import PART_SCHEMA
from specextend.data.storage import Location, delete, remove_temporary_files, write_bytes

MOST_PARTS = 4096
"""Parts that a run may have before a start merges them: so many are read in seconds."""
MERGED_BYTES = 8 << 20
"""Size at which a merged part is full; a larger one is left as it is."""


def compact(
    output: Location,
    fingerprint: str,
    checkpoint: Callable[[], object] = lambda: None,
    most_parts: int = MOST_PARTS,
    merged_bytes: int = MERGED_BYTES,
) -> int:
    """Merge neighbouring small parts if there are more than `most_parts`; return how many fewer there are.

    A merged part takes the name of its last source, and so the place of all of them in the order of commits. It
    replaces that one in one step, and only then are the others deleted: whoever reads meanwhile, or after a kill, finds
    each row in one part or in two of which one counts. Rows keep where they were committed (ORIGIN). The driver alone
    may call it, while it holds the lock. fingerprint: that of the run. checkpoint: called between parts; may raise.
    Raises DamagedPartError, StrangePartError.
    """
    sizes = part_sizes(output)
    if len(sizes) <= most_parts:
        return 0
    remove_temporary_files(parts_folder(output))
    groups = list(_groups(sizes, merged_bytes))
    origin = partial(provenance, read_manifest(output), read_starts(output))
    merge = partial(_merge, output, fingerprint, origin)
    cost = partial(_stored_bytes, sizes)
    for _ in in_order(merge, groups, cost=cost, most=8 * merged_bytes):
        checkpoint()
    return sum(len(names) - 1 for names in groups)


def _groups(sizes: Mapping[str, int], merged_bytes: int) -> Iterator[list[str]]:
    """Yield the names of neighbouring parts that become one, in the order of their commits."""
    group: list[str] = []
    total = 0
    for name, size in sizes.items():
        if total + size > merged_bytes:
            if len(group) > 1:
                yield group
            group, total = [], 0
        group.append(name)
        total += size
    if len(group) > 1:
        yield group


def _stored_bytes(sizes: Mapping[str, int], names: list[str]) -> int:
    return sum(sizes[name] for name in names)


def _merge(output: Location, fingerprint: str, origin: Callable[[list[str]], bytes], names: list[str]) -> None:
    """Merge parts into the last of them."""
    columns = [*PART_SCHEMA.names, *ORIGIN]
    table = latest([read_part(output, name, columns, fingerprint) for name in names])
    run_ids = list(dict.fromkeys(run_id_of(name) for name in pc.unique(table["origin"]).to_pylist()))
    metadata = part_metadata(run_id_of(names[-1]), fingerprint, origin(run_ids))
    schema = pa.schema([*PART_SCHEMA, *ORIGIN_SCHEMA], metadata=metadata)
    sink = pa.BufferOutputStream()
    pq.write_table(table.cast(schema), sink, compression="zstd")
    write_bytes(parts_folder(output).child(names[-1]), sink.getvalue())
    for name in reversed(names[:-1]):  # so that the next one that is left is the merged one, or not merged
        delete(parts_folder(output).child(name))
