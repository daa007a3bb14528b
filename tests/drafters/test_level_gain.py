"""What a level of drafting must promise to pay, learned from a clock that tests set."""

import pytest

from specextend.drafters.causal import LevelGain

LEVEL_S = 0.003
STEP_S = 0.03
NUM_TOKENS = 2


class Clock:
    """Shows what it was set to, in seconds."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now

    def step(self, gain, *, pause_s=0.0, num_read=NUM_TOKENS):
        """Take a step of three levels whose tokens are read behind a pause."""
        gain.begin()
        self.now += 3 * LEVEL_S
        gain.end(3)
        self.now += STEP_S - 3 * LEVEL_S + pause_s
        gain.read([num_read])


@pytest.fixture
def clock():
    return Clock()


def test_a_level_must_promise_what_a_step_decides_in_its_time(clock):
    """Three milliseconds of steps that decide two tokens in thirty: a fifth of a token."""
    gain = LevelGain(clock, 0.7)
    found = []
    for _ in range(4):
        found.append(gain.least)
        clock.step(gain)
    assert found[:1] == [0.7]
    assert found[2:] == [pytest.approx(LEVEL_S * NUM_TOKENS / STEP_S)] * 2


def test_what_stands_between_two_steps_does_not_count(clock):
    """A prompt of a minute, or the tokens of a long pause read at once, say nothing of a step."""
    gain = LevelGain(clock, 0.7)
    for _ in range(3):
        clock.step(gain)
    known = gain.least
    clock.step(gain)
    gain.interrupt()
    clock.now += 60
    clock.step(gain)
    clock.step(gain, pause_s=5, num_read=200)
    clock.step(gain)
    clock.step(gain)
    assert gain.least == pytest.approx(known)
