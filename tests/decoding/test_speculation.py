"""When to speculate and how much, in plain numbers: no model, no clock."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specextend.decoding.sequence import PROBATION_STEPS, Speculation
from specextend.decoding.speculation import KNOWN_STEPS, Experience, who_speculates

DRAFT = 0.1
LOAD = 1.3
COST = LOAD + DRAFT - 1
EXPECTED = 0.9
NUM_ROWS = 3
LENGTH = 1000


def verify_s(num_rows):
    """Plain steps that a verification takes: `LOAD` for three rows, in proportion for others."""
    return 1.0 + (LOAD - 1.0) * (num_rows - 1) / (NUM_ROWS - 1)


@pytest.mark.parametrize("length", [64, 128, 256, 1024])
@pytest.mark.parametrize("accepted", [[0], [1, 0, 0, 0, 0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 2, 0, 0, 0, 0, 0]])
def test_what_speculation_loses_stays_under_three_percent_or_two_steps(accepted, length):
    """A first verdict costs two plain steps; later tries are paid from a purse of 2% of the decoding so far."""
    state = Speculation()
    account = Experience()
    num_steps = lost = num_tokens = 0
    while num_tokens < length:
        number = accepted[num_steps % len(accepted)]
        chosen = bool(who_speculates([state], verify_s, lambda _: DRAFT, in_credit=account.in_credit))
        if state.active and not chosen:
            state.pause()
        elif chosen and not state.active:
            state.resume()
        if state.active:
            state.observe(NUM_ROWS, EXPECTED, number)
            account.observe(LENGTH, NUM_ROWS, EXPECTED, number, COST)
        else:
            state.observe_idle(1, 0.0, 0)
            account.observe_idle(1, 0.0, 0)
        num_steps += 1
        num_tokens += 1 + number * state.active
        lost += (COST - number) * state.active
    assert lost <= max(5 * COST, 0.03 * num_tokens) + DRAFT


def test_a_new_document_expects_what_those_of_its_length_brought():
    """Where drafts are good for short documents alone, a long one must not begin with their promise."""
    account = Experience()
    for _ in range(2 * KNOWN_STEPS):
        account.observe(LENGTH, NUM_ROWS, EXPECTED, 2, COST)
    assert account.begin(LENGTH).gain == account.begin(7 * LENGTH).gain > 1.5  # nothing is known of long ones
    for _ in range(2 * KNOWN_STEPS):
        account.observe(7 * LENGTH, NUM_ROWS, EXPECTED, 0, COST)
    assert account.begin(LENGTH).gain > 1.5 > 0.5 > account.begin(7 * LENGTH).gain


def known(gain):
    """A sequence long past its first tries, whose steps accepted `gain` tokens as its draft expected."""
    state = Speculation()
    for _ in range(PROBATION_STEPS):
        state.observe(NUM_ROWS, gain, gain)  # accepted tokens are whole numbers in truth; this is their mean
    return state


@given(
    st.lists(st.floats(0, 3), min_size=1, max_size=6),
    st.lists(st.floats(0.01, 2), min_size=6, max_size=6),
)
def test_no_other_choice_of_a_batch_is_better(gains, draft_loads):
    """Against every number of speculating sequences, the likeliest first."""
    states = [known(gain) for gain in gains]
    draft_loads = sorted(draft_loads)
    chosen = who_speculates(states, verify_s, lambda count: draft_loads[count - 1], in_credit=True)

    def rate(size):
        best = sorted((state.gain for state in states), reverse=True)[:size]
        return (len(states) + sum(best)) / (LOAD + draft_loads[size - 1])

    rates = [len(states) * 0.98, *(rate(size) for size in range(1, len(states) + 1))]
    assert rates[len(chosen)] == pytest.approx(max(rates))
