"""The commits are the only record of what is done."""

from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.core import DocumentKey
from specextend.data.commits import KEY_COLUMNS, CommitWriter, pending, read_commits, read_results
from tests.data.conftest import location
from tests.properties.rows import done, failed, in_a_folder

OUTCOMES = st.sampled_from(["done", "passing", "final"])
KEYS = [DocumentKey(0, row) for row in range(4)]


@settings(max_examples=40)
@given(st.lists(st.dictionaries(st.sampled_from(KEYS), OUTCOMES), max_size=5), st.randoms())
def test_done_beats_error_and_later_beats_earlier(starts, draw):
    """A run id is random: order by it and a retried row would be an error again in half of all runs. The latest error
    says whether another try may mend it; an empty text fails every night.
    """

    def check(folder):
        output = location(folder)
        best = {}
        for number, start in enumerate(starts):
            errors = {key: {"error_class": f"E{number}", "retryable": start[key] == "passing"} for key in start}
            rows = [done(key) if start[key] == "done" else failed(key) | errors[key] for key in start]
            CommitWriter(output, f"{draw.getrandbits(32):08x}").commit(rows)
            best |= {key: (start[key], f"E{number}") for key in start if best.get(key, [""])[0] != "done"}
        progress = read_commits(output)
        assert progress.done == {key for key, (outcome, _) in best.items() if outcome == "done"}
        assert progress.errors == {key: error for key, (outcome, error) in best.items() if outcome != "done"}
        for retry, again in {"none": (), "retryable": ("passing",), "all": ("passing", "final")}.items():
            wanted = [key for key in KEYS if key not in best or best[key][0] in again]
            assert list(pending([range(4)], progress, retry_errors=retry)) == wanted
        rows = [row for table in read_results(output, KEY_COLUMNS) for row in table["row"].to_pylist()]
        assert sorted(rows) == sorted(key.row for key in best), "each row counts once"

    in_a_folder(check)
