"""Documents in parts over real Ray: a part that fails is named, and a worker that dies loses none."""

import pytest

from specextend.cluster.exits import EXIT_TOO_MANY_ERRORS

SECTIONS = {
    "prompt": {"length_policy": "parts", "max_prompt_tokens": 240},
    "parts": {"instruction": "Shorten.", "merge_instruction": "Merge."},
}
SENTENCES = "".join(f"Rain fell on roof {number} all night. " for number in range(24))
OTHERS = SENTENCES.replace("Rain", "Snow")


@pytest.mark.slow
def test_a_part_that_fails_is_found_and_named_and_a_worker_that_dies_loses_none(job, tmp_path):
    """Parts share a batch, so a failure there is everybody's; tried again one by one, it is one part's."""
    killed = f"{SENTENCES} kill:{tmp_path / 'killed'} {OTHERS}"
    texts = [f"{SENTENCES} raise {OTHERS}", killed, "short"]
    run = job(texts, max_attempts=3)  # one for a neighbour's failure, one for its own death, and one that succeeds
    run.sections = SECTIONS
    assert run.run() == EXIT_TOO_MANY_ERRORS
    [error] = run.errors().values()
    assert error["doc_id"] == "d0"
    assert error["error_class"] == "ValueError"
    assert error["message"].startswith("part ")
    assert error["message"].endswith("this document cannot be done")
    assert len(run.summaries()["d1"]["part_summaries"]) > 2
