"""Commits: whole, or not there, or refused by name."""

from __future__ import annotations

import tempfile

from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.parts import PartWriter, list_parts, pending, read_parts
from specextend.data.storage import resolve
from tests.properties.rows import done, failed

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)
KEYS = st.builds(DocumentKey, st.integers(0, 3), st.integers(0, 7))
COMMITS = st.lists(st.tuples(st.from_regex(r"\A[0-9a-f]{8}\Z"), st.lists(st.tuples(KEYS, st.booleans()))), max_size=6)


@settings(max_examples=60)
@given(COMMITS)
def test_progress_is_what_was_committed_last_and_done_beats_error(
    commits: list[tuple[str, list[tuple[DocumentKey, bool]]]],
) -> None:
    """Run ids are random: an order that came from them would bring errors back in half of all runs."""
    with tempfile.TemporaryDirectory() as folder:
        output = resolve(folder)
        done_keys, error_keys = set(), set()
        for run_id, rows in commits:
            PartWriter(output, run_id).commit([done(key) if is_done else failed(key) for key, is_done in rows])
            done_keys |= {key for key, is_done in rows if is_done}
            error_keys |= {key for key, is_done in rows if not is_done}
        progress = read_parts(output)
        assert progress.done == done_keys
        assert progress.errors.keys() == error_keys - done_keys
        everything = {DocumentKey(file, row) for file in range(4) for row in range(8)}
        assert set(pending([8] * 4, progress)) == everything - done_keys - error_keys
        assert set(pending([8] * 4, progress, retry_errors="all")) == everything - done_keys
        assert len(list_parts(output)) == sum(bool(rows) for _, rows in commits)
