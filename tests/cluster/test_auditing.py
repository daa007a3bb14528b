"""The audit's queue and its end, without an engine: whole batches by themselves, and nobody waits for ever."""

import pytest

from specextend.cluster.auditing import Auditor, is_sampled
from specextend.cluster.messages import Suspected
from specextend.core import Agreement, Completion, DocumentKey, Request, SamplingParams
from specextend.data.inputs import DocumentError
from specextend.stats import DecodingStats


def offer(auditor, *names):
    """Documents that are done, each with two tokens."""
    for row, name in enumerate(names):
        request = Request(request_id=name, prompt_token_ids=[1], max_new_tokens=2, sampling=SamplingParams(seed=row))
        stats = DecodingStats(prefill_s=1.0, draft_prefill_s=0.5, draft_s=1.0, verify_s=2.0, other_s=0.25)
        auditor.offer(DocumentKey(0, row), name, request, Completion(name, [4, 5], "x", "length", stats))


def plain(request, num_equal=2, gap=None):
    stats = DecodingStats(prefill_s=1.0, verify_s=6.0)
    return Completion(request.request_id, [4, 5], "x", "length", stats, Agreement(num_equal, gap))


def test_the_sample_is_that_share_and_the_same_in_every_start():
    """A document is in it or not, by its seed alone."""
    chosen = {seed for seed in range(4000) if is_sampled(seed, 0.1)}
    assert 330 < len(chosen) < 470
    assert chosen < {seed for seed in range(4000) if is_sampled(seed, 0.2)}
    assert not any(is_sampled(seed, 0.0) for seed in range(100))
    assert all(is_sampled(seed, 1.0) for seed in range(100))


def test_a_batch_is_due_when_it_is_full_and_at_the_end():
    """Beside neighbours that speculate, a plain step would be charged for their trees: it is handed out whole."""
    auditor = Auditor(1.0, batch_size=2)
    offer(auditor, "a")
    assert not auditor.is_due
    offer(auditor, "b", "c")
    assert auditor.is_due
    batch = auditor.take()
    assert [request.audit_of for request in batch] == [(4, 5), (4, 5)]
    for request in batch:
        assert auditor.settle(request.request_id, plain(request))
    assert not auditor.is_due
    assert auditor.num_open == 1
    auditor.is_ending = True
    assert auditor.is_due


def test_a_row_says_what_was_compared_and_the_time_of_both():
    """The draft's prefill is a price of speculation; the target's is paid in both."""
    auditor = Auditor(1.0, batch_size=1)
    offer(auditor, "a")
    [request] = auditor.take()
    auditor.settle(request.request_id, plain(request, num_equal=1, gap=0.25))
    assert auditor.rows(0) == (
        {
            "file": 0,
            "row": 0,
            "doc_id": "a",
            "num_tokens": 2,
            "num_equal_tokens": 1,
            "gap": 0.25,
            "batch_size": 1,
            "is_full_batch": True,
            "prefill_s": 1.0,
            "speculative_s": 3.75,
            "num_plain_tokens": 2,
            "plain_prefill_s": 1.0,
            "plain_s": 6.0,
            "error": None,
        },
    )
    assert auditor.rows(1) == (), "the driver has it"


@pytest.mark.parametrize("how", ["alone", "with its batch"])
def test_an_audit_that_fails_is_a_row_with_its_error(how):
    """It costs the run nothing but the comparison, and the end of the run does not wait for it."""
    auditor = Auditor(1.0, batch_size=2)
    offer(auditor, "a", "b")
    first, second = auditor.take()
    if how == "alone":
        auditor.settle(first.request_id, DocumentError("ValueError", "no", "decode", retryable=False))
        auditor.settle(second.request_id, plain(second))
    else:
        auditor.settle(first.request_id, plain(first))
        auditor.fail_batch(Suspected("ValueError", "no"))
    failed = [row for row in auditor.rows(0) if row["error"]]
    assert {row["error"] for row in failed} == {"ValueError: no"}
    assert all(row.get("num_equal_tokens") is None for row in failed)
    assert len(auditor.rows(0)) == 2
    assert (auditor.num_open, auditor.is_due) == (0, False)
