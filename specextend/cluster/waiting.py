"""Documents that wait for a worker, longest first; a worker may have to leave some files to others."""

from __future__ import annotations

import heapq
import math
from collections.abc import Collection

from specextend.core import DocumentKey

LENGTH_STEP = 1.1
"""Documents whose lengths differ by less than about this factor go in input order."""

Rank = tuple[int, DocumentKey]


class Waiting:
    """One queue a file, and the first of each in a queue of their own."""

    def __init__(self) -> None:
        self._files: dict[int, list[Rank]] = {}
        self._firsts: list[Rank] = []
        self._size = 0

    def __len__(self) -> int:
        return self._size

    def put(self, key: DocumentKey, num_tokens: int) -> None:
        """Add a document."""
        entry, queue = rank(num_tokens, key), self._files.setdefault(key.file, [])
        heapq.heappush(queue, entry)
        if queue[0] == entry:
            heapq.heappush(self._firsts, entry)
        self._size += 1

    def take(self, but_of: Collection[int | None] = ()) -> DocumentKey | None:
        """Remove the first document of any file but some; None where there is none."""
        passed, found = [], None
        while self._firsts and found is None:
            entry = heapq.heappop(self._firsts)
            queue = self._files[entry[1].file]
            if not queue or queue[0] != entry:  # another one has come before it, and stands for its file
                continue
            if entry[1].file in but_of:
                passed.append(entry)
            else:
                found = heapq.heappop(queue)[1]
                self._size -= 1
                if queue:
                    heapq.heappush(self._firsts, queue[0])
        for entry in passed:
            heapq.heappush(self._firsts, entry)
        return found

    def keys(self) -> list[DocumentKey]:
        """All of them, in their order."""
        return [key for _, key in sorted(entry for queue in self._files.values() for entry in queue)]


def rank(num_tokens: int, key: DocumentKey) -> Rank:
    """Longest first, by and large. Those of about one length in input order: a worker reads whole row groups, and one
    whose rows were asked for from one end of the run to the other would be read once for every row.
    """
    return -round(math.log(max(1, num_tokens), LENGTH_STEP)), key
