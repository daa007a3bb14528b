"""A step is short enough to be followed through the code."""

import sys
from pathlib import Path

import pytest

import specextend
from tests.tiny_models import random_prompt, request, tiny_engine

PACKAGE = Path(specextend.__file__).parent
OURS = {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if not path.stem.endswith("_options")}


@pytest.mark.parametrize("draft", ["eagle", "good"])
def test_a_step_crosses_at_most_fifteen_modules(draft, pair, monkeypatch):
    """Who follows one through the code holds as many pages in the head; options that it reads do not count."""
    changes = {"cache__refresh_every": 1, "tree__nodes": "auto", "attention__backend": "sdpa"}
    engine = tiny_engine(pair, draft, **changes)
    drafter = engine.drafter
    steps = list[set[str]]()
    propose = drafter.propose
    absorb = drafter.absorb

    def note(frame, event, arg):
        _, _, module = frame.f_code.co_filename.rpartition("/specextend/")
        steps[-1].add(module)

    def begin(slots, num_drafts):
        steps.append(set())
        sys.setprofile(note)
        return propose(slots, num_drafts)

    def end(slots, decided):
        absorb(slots, decided)
        sys.setprofile(None)

    def leave_out(*_):
        sys.setprofile(None)  # the draft pauses: what it reads then is several steps'
        steps[-1].clear()

    monkeypatch.setattr(drafter, "glance", leave_out)
    monkeypatch.setattr(drafter, "propose", begin)
    monkeypatch.setattr(drafter, "absorb", end)
    list(engine.generate([request("a", random_prompt(102), 24, temperature=0.8)]))
    sys.setprofile(None)  # the last step absorbs nothing: behind it comes the end
    crossed = [{name for name in step if name in OURS} for step in steps[:-1]]
    assert max(map(len, crossed)) <= 15, sorted(max(crossed, key=len))
    assert {"decoding/engine.py", "decoding/sampling.py", "decoding/retrieval.py"} <= set().union(*crossed)
