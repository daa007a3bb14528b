from __future__ import annotations

import math

from specextend.cluster.leases import Limits, Tried
from specextend.cluster.places import FIRST_REST_S, MAX_DEATHS, Coming, Place, Places, Spot
from specextend.cluster.scheduler import ALONE_SHARE, Scheduler
from specextend.core import DocumentKey
from tests.cluster.lengths import rows_of_length


def gpu(number: int, host: str = "h") -> Place:
    return Place(f"node of {host}", Spot(host, f"GPU {number}"))


def up(*places: Place) -> Places:
    """Places with a worker each, and nothing more to come."""
    found = Places()
    for place in places:
        found.arrive(place)
    return found


def dies(places: Places, place: Place, *, is_explained: bool = False) -> None:
    """A worker dies and its successor is there; nobody else is being built."""
    places.died(place, "gone", is_explained=is_explained)
    places.expect(Coming(1))
    places.arrive(place)


def test_a_place_is_trusted_until_a_worker_dies_there_and_again_when_a_document_is_done():
    places = up(gpu(0), gpu(1))
    assert places.is_trusted(gpu(0))
    dies(places, gpu(0))
    assert not places.is_trusted(gpu(0))
    places.produced(gpu(0))
    assert places.is_trusted(gpu(0))


def test_the_only_place_is_trusted_whatever_happens_there():
    """One GPU: somebody must say that a document is poison. While another worker may come up, it waits for that."""
    places = up(gpu(0))
    dies(places, gpu(0))
    assert places.is_trusted(gpu(0))
    places.expect(Coming(1))
    assert not places.is_trusted(gpu(0))


def test_workers_rest_longer_and_longer_where_others_have_died_and_then_for_ever():
    """Not at once: one death is what every poison document brings."""
    places, rests = up(gpu(0), gpu(1)), []
    for _ in range(MAX_DEATHS):
        places.died(gpu(0), "gone", is_explained=False)
        rest = places.arrive(gpu(0))
        rests.append(rest.seconds if rest else 0.0)
    assert rests == [0.0, FIRST_REST_S, 2 * FIRST_REST_S, 4 * FIRST_REST_S, 8 * FIRST_REST_S, math.inf]
    assert places.is_left_out(gpu(0))
    assert rest is not None
    assert (rest.num_deaths, rest.last_words) == (MAX_DEATHS, "gone")


def test_the_last_place_is_never_left_out_and_never_rests():
    """Who should do the documents?"""
    places = up(gpu(0))
    for _ in range(3 * MAX_DEATHS):
        places.died(gpu(0), "gone", is_explained=False)
        assert places.arrive(gpu(0)) is None


def test_deaths_over_documents_that_killed_elsewhere_leave_no_place_out():
    """At the end of a run there may be nothing left but poison."""
    places = up(gpu(0), gpu(1))
    for _ in range(3 * MAX_DEATHS):
        dies(places, gpu(0), is_explained=True)
    assert not places.is_left_out(gpu(0))
    assert places.is_trusted(gpu(0))
    assert places.for_retry(set(), {gpu(0), gpu(1)}) == {gpu(1)}, "and yet the other one is tried first"


def test_a_charged_document_runs_on_another_host_first_then_on_another_device_then_anywhere():
    places = up(gpu(0), gpu(1), gpu(0, "other"))
    seeing = {gpu(0), gpu(1), gpu(0, "other")}
    assert places.for_retry({gpu(0).spot}, seeing) == {gpu(0, "other")}
    assert places.for_retry({gpu(0).spot, gpu(0, "other").spot}, seeing) == {gpu(1)}
    assert places.for_retry({place.spot for place in seeing}, seeing) == seeing


def test_a_charged_document_waits_for_a_place_that_may_come_up():
    """The broken GPU is often the first to be up again: it does not load for long."""
    places = up(gpu(0), gpu(1))
    places.expect(Coming(1))
    assert places.for_retry({gpu(0).spot, gpu(1).spot}, {gpu(0), gpu(1)}) == set()
    assert places.for_retry({gpu(0).spot}, {gpu(0), gpu(1)}) == {gpu(1)}
    places.expect(Coming(1, num_new=1))
    assert places.for_retry({gpu(0).spot}, {gpu(0), gpu(1)}) == set(), "a cluster that grows may have another host"


def test_of_several_places_a_charged_document_gets_those_with_the_fewest_deaths():
    places = up(gpu(0), gpu(1), gpu(2))
    dies(places, gpu(1))
    assert places.for_retry({gpu(0).spot}, {gpu(0), gpu(1), gpu(2)}) == {gpu(2)}


def key(row: int) -> DocumentKey:
    return DocumentKey(0, row)


def plan_of(num_documents: int, num_places: int, **options: int) -> Scheduler:
    """Documents of one length, and a worker `w<n>` at each place."""
    plan = Scheduler(rows_of_length([5] * num_documents), Limits(**options), leases_per_worker=2)
    for number in range(num_places):
        plan.join(f"w{number}", gpu(number), 0)
    return plan


def rows_at(plan: Scheduler, now: float) -> dict[str, list[int]]:
    """What each worker is handed now; all of it has started at once."""
    rows: dict[str, list[int]] = {}
    for worker, lease in plan.assign(now):
        rows.setdefault(worker, []).append(lease.key.row)
        plan.report(worker, 1, [lease.lease_id], now)
    return rows


def replace(plan: Scheduler, worker: str, number: int) -> list[DocumentKey]:
    """A worker dies and one with a `+` behind its name is at its place; who is given up."""
    given_up = plan.leave(worker, "WorkerDied", "gone")
    plan.join(f"{worker}+", gpu(number), 0)
    return [item.key for item in given_up]


def finish_all(plan: Scheduler, worker: str) -> None:
    for lease in plan.leased():
        if plan.holder(lease.lease_id) == worker:
            plan.finish(lease.lease_id)
            plan.produced(worker)


def test_a_charged_document_waits_for_a_healthy_worker_to_run_empty():
    """It went to the broken place's next worker, which is always empty, and was charged again."""
    plan = plan_of(20, 2)
    assert rows_at(plan, 0) == {"w0": [0, 2], "w1": [1, 3]}
    assert replace(plan, "w0", 0) == []
    assert rows_at(plan, 1) == {"w0+": [4]}, "one of those that nothing is known of, alone"
    finish_all(plan, "w1")
    assert rows_at(plan, 2) == {"w1": [0]}, "charged at the other place"
    finish_all(plan, "w1")
    assert rows_at(plan, 3) == {"w1": [2]}
    finish_all(plan, "w1")
    assert rows_at(plan, 4) == {"w1": [5, 6]}, "and then as before"


def test_few_workers_are_kept_for_charged_documents():
    """A hundred charged documents must not stop the others: one worker in four."""
    plan = plan_of(60, 8)
    rows_at(plan, 0)
    for number in range(3):
        replace(plan, f"w{number}", number)
    rows_at(plan, 1)
    for worker in ("w3", "w4", "w5", "w6", "w7"):
        finish_all(plan, worker)
    handed_out = rows_at(plan, 2)
    charged = {row for rows in handed_out.values() for row in rows} & {0, 1, 2, 8, 9, 10}
    assert len(charged) == 8 // ALONE_SHARE
    assert sum(len(rows) == 2 for rows in handed_out.values()) == 3


def test_a_place_with_a_death_gets_one_document_until_one_is_done():
    plan = plan_of(20, 2)
    rows_at(plan, 0)
    replace(plan, "w0", 0)
    assert rows_at(plan, 1) == {"w0+": [4]}
    finish_all(plan, "w0+")
    assert rows_at(plan, 2) == {"w0+": [5, 6]}


def test_only_the_first_of_a_row_of_deaths_charges_documents():
    plan = plan_of(20, 2)
    rows_at(plan, 0)
    replace(plan, "w0", 0)
    [row] = rows_at(plan, 1)["w0+"]
    assert replace(plan, "w0+", 0) == []
    charges = plan.charges()
    assert charges is not None
    assert charges.keys() == {key(0), key(2)}
    assert row not in {0, 2}


def test_with_a_single_attempt_a_document_must_die_at_two_places():
    plan = plan_of(3, 2, max_attempts=1)
    rows_at(plan, 0)
    assert replace(plan, "w0", 0) == []
    finish_all(plan, "w1")
    assert rows_at(plan, 1) == {"w1": [0]}
    assert replace(plan, "w1", 1) == [key(0)]


def test_a_start_goes_on_where_the_last_one_stopped_counting():
    """Each start gave a document that kills its worker all its attempts again."""
    tried = {key(0): Tried(2, frozenset({gpu(0).spot}))}
    plan = Scheduler(rows_of_length([5, 5]), Limits(max_attempts=3), 2, tried=tried)
    plan.join("w0", gpu(0), 0)
    assert plan.num_wanted == 3, "a worker elsewhere, beside one for each document"
    plan.join("w1", gpu(1), 0)
    assert rows_at(plan, 0) == {"w1": [0], "w0": [1]}, "alone, and where it was not charged yet"
    [given_up] = plan.leave("w1", "WorkerDied", "gone")
    assert (given_up.key, given_up.attempts) == (key(0), 3)


def test_attempts_before_an_error_row_are_counted_on_and_forgiven():
    """`--retry-errors` asks for new attempts; the row says how many there were in all."""
    tried = {key(0): Tried(3, forgiven=3)}
    plan = Scheduler(rows_of_length([5]), Limits(max_attempts=2), 2, tried=tried)
    plan.join("w0", gpu(0), 0)
    [(_, lease)] = plan.assign(0)
    assert lease.attempt == 4
    plan.report("w0", 1, [lease.lease_id], 0)
    assert plan.leave("w0", "WorkerDied", "gone") == []
    plan.join("w0+", gpu(0), 0)
    rows_at(plan, 0)
    [given_up] = plan.leave("w0+", "WorkerDied", "gone")
    assert given_up.attempts == 5
