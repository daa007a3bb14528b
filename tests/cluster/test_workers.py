from specextend.cluster.workers import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Roster,
)


def test_the_pause_between_failed_starts_grows_up_to_a_minute():
    """A full disk is not mended by trying ten times a second."""
    roster = Roster(2)
    good, bad = roster.due(0, 9)
    roster.ready(good)
    now = 0.0
    pauses = []
    for _ in range(10):
        pauses.append(roster.failed(bad, "disk full", now))
        assert roster.due(now + pauses[-1] - 0.01, 9) == []
        now += pauses[-1]
        [bad] = roster.due(now, 9)
    assert pauses[:3] == [FIRST_PAUSE_S, 2 * FIRST_PAUSE_S, 4 * FIRST_PAUSE_S]
    assert pauses[-1] == LONGEST_PAUSE_S
