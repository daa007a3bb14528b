from __future__ import annotations

import threading

from specextend.cluster.worker import Inbox, document_seed
from specextend.core import Request


def request(name: str, length: int) -> Request:
    return Request(request_id=name, prompt_token_ids=[1] * length, max_new_tokens=1)


def test_the_longest_request_goes_to_the_engine_first():
    """Calls arrive out of order: the order is made here."""
    inbox = Inbox()
    for name, length in (("short", 1), ("long", 9), ("middle", 5)):
        inbox.put(request(name, length))
    assert [inbox.take(block=False).request_id for _ in range(3)] == ["long", "middle", "short"]
    assert inbox.take(block=False) is None


def test_an_idle_engine_waits_for_work_without_turning():
    """A waiting thread costs the others of the process nothing."""
    inbox = Inbox()
    taken: list[str] = []
    thread = threading.Thread(target=lambda: taken.append(inbox.take(block=True).request_id))
    thread.start()
    inbox.put(request("a", 1))
    thread.join(timeout=30)
    assert taken == ["a"]


def test_a_lease_taken_back_before_it_began_never_begins():
    """Only one that has left the inbox must be cancelled in the engine."""
    inbox = Inbox()
    inbox.put(request("a", 1))
    inbox.put(request("b", 2))
    assert inbox.remove("a")
    assert not inbox.remove("a")
    assert inbox.take(block=False).request_id == "b"
    assert inbox.take(block=False) is None


def test_a_document_keeps_its_seed_wherever_and_whenever_it_runs():
    """Pinned: another value would make a resumed sampled run differ from an undisturbed one."""
    assert document_seed(0, "d1") == document_seed(0, "d1")
    assert len({document_seed(run, f"d{row}") for run in range(3) for row in range(100)}) == 300
    assert all(0 <= document_seed(run, "d") < 2**63 for run in range(100))
    assert document_seed(7, "govreport-1k-00") == 1394459061051453103
