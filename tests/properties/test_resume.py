"""Starts that end anywhere, and what a run is at its end."""

import os
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter, pending, read_commits
from specextend.data.finalize import finalize
from specextend.data.run_folder import Counts
from specextend.data.source import Source
from specextend.data.storage import Location, resolve
from tests.job.conftest import rows as rows_of
from tests.properties.rows import done, failed, in_a_folder, name_of, source_of

SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=4)


class Killed(BaseException):
    """The process ended here: nothing catches it."""


class History:
    """A run of many starts, and its own books of it."""

    def __init__(self, folder, data):
        self.data, self.sizes = data, data.draw(SIZES)
        self.source: Source = source_of(folder / "input", self.sizes)
        self.folder = folder / "output"
        self.output: Location = resolve(str(self.folder))
        self.expected: dict[DocumentKey, str] = {}
        """The text of a row done, or empty for a row given up."""
        self.num_starts = 0

    @property
    def keys(self):
        return [DocumentKey(file, row) for file, size in enumerate(self.sizes) for row in range(size)]

    def start(self, *, retry_errors, to_its_end):
        """A start that does some of what is open, in any order, and commits in pieces of any size."""
        self.num_starts += 1
        writer = CommitWriter(self.output, self.data.draw(st.from_regex(r"\A[0-9a-f]{8}\Z")))
        keys = list(
            pending(map(range, self.sizes), read_commits(self.output), retry_errors="all" if retry_errors else "none")
        )
        assert set(keys) == {key for key in self.keys if self.is_open(key, retry_errors)}
        order = self.data.draw(st.permutations(keys))
        while order:
            size = self.data.draw(st.integers(1, len(order)))
            if not to_its_end and self.data.draw(st.booleans()):
                self.die_in_a_commit(writer, order[:size])
                return
            rows = [self.outcome(key) for key in order[:size]]
            writer.commit(rows)
            order = order[size:]

    def is_open(self, key, retry_errors):
        return key not in self.expected or (retry_errors and not self.expected[key])

    def outcome(self, key):
        is_done = self.data.draw(st.booleans())
        self.expected[key] = f"by start {self.num_starts}" if is_done else ""
        return done(key, self.expected[key]) if is_done else failed(key, f"in start {self.num_starts}")

    def die_in_a_commit(self, writer, keys):
        """Killed before the part has its name: none of its rows counts."""
        rows = [done(key, "never seen") for key in keys]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", killed)
            patch.setattr(os, "unlink", lambda path: None)  # a killed process cleans nothing up
            with pytest.raises(Killed):
                writer.commit(rows)

    def check(self):
        """Every row is there once, as it was when it was done or given up last."""
        summaries, errors = rows_of(self.folder / "summaries"), rows_of(self.folder / "errors")
        found = [(row["doc_id"], row["summary"]) for row in summaries]
        assert found == [(name_of(key), self.expected[key]) for key in self.keys if self.expected[key]]
        assert [row["n"] for row in summaries] == [key.row for key in self.keys if self.expected[key]]
        assert [row["doc_id"] for row in errors] == [name_of(key) for key in self.keys if not self.expected[key]]
        ids = Counter(row["doc_id"] for row in summaries + errors)
        assert ids == Counter(map(name_of, self.keys))


def killed(*arguments):
    raise Killed


@settings(max_examples=20)
@given(st.data(), st.lists(st.booleans(), max_size=4))
def test_however_its_starts_ended_a_resumed_run_has_every_row_once(data, starts):
    """Killed between commits or inside one, with error rows done again or not: nothing lost, nothing twice."""

    def check(folder):
        history = History(folder, data)
        for retry_errors in starts:
            history.start(retry_errors=retry_errors, to_its_end=False)
        history.start(retry_errors=False, to_its_end=True)
        num_done = sum(map(bool, history.expected.values()))
        rows = len(history.keys)
        assert finalize(history.source, history.output) == Counts(rows, num_done, rows - num_done)
        history.check()

    in_a_folder(check)


@settings(max_examples=12)
@given(st.data(), st.integers(0, 9))
def test_a_finalize_that_was_killed_anywhere_is_made_good_by_the_next(data, num_files):
    """Each file is whole or not there, so a second finalize only adds what is missing."""

    def check(folder):
        history = History(folder, data)
        history.start(retry_errors=False, to_its_end=True)
        left = iter(range(num_files))

        def replace(source, target, rename=os.replace):
            if next(left, None) is None:
                raise Killed
            rename(source, target)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(os, "replace", replace)
            try:
                finalize(history.source, history.output)
            except Killed:
                assert not (history.folder / "_SUCCESS").exists()
        finalize(history.source, history.output)
        history.check()
        assert not list(history.folder.rglob(".*")), "no litter of the killed one is left"

    in_a_folder(check)
