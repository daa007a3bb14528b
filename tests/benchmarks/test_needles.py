"""Probes whose needle is where it is said to be, and a replay that shows of them what the policy shows."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch

from benchmarks.command import main
from benchmarks.needles import ProbeMaker, accepted
from specextend.decoding.tree import DraftTrees
from specextend.models import load_tokenizer

ROOT = Path(__file__).parents[2]
KINDS = ("passkey", "needles", "quote")


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(str(ROOT / ".models/SmolLM2-135M-Instruct"))


@pytest.fixture(scope="module")
def maker(tokenizer):
    return ProbeMaker(tokenizer, "", pq.read_table(ROOT / "examples/govreport.parquet")["text"].to_pylist())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [512, 2048])
def test_needle_tokens_stand_where_their_source_is_said_to_be(kind, length, maker):
    """So that one can tell whether the draft could see what it was to repeat."""
    for number in range(3):
        probe = maker.make(kind, length, number)
        assert length - 150 < len(probe.prompt_token_ids) <= length
        pairs = [(t, s) for t, s in zip(probe.answer_token_ids, probe.sources, strict=True) if s is not None]
        assert 4 <= len(pairs) < len(probe.answer_token_ids)
        assert all(probe.prompt_token_ids[source] == token_id for token_id, source in pairs)


@pytest.mark.parametrize(
    ("chosen", "count"), [([7, 1, 2, 9], 3), ([7, 1, 4, 9], 1), ([7, 3, 2, 9], 0), ([7, 1, 2, 5], 2)]
)
def test_a_path_is_accepted_as_long_as_target_and_answer_agree(chosen, count):
    """What the target would not choose is no acceptance, even where the tree holds the answer."""
    token_ids, parents = torch.tensor([7, 1, 4, 2, 9]), torch.tensor([-1, 0, 1, 1, 3])
    tree = DraftTrees(token_ids, parents, torch.tensor([0, 1, 2, 2, 3]), torch.zeros(5), [5])
    assert accepted(tree, [7, 1, 2, 9], chosen, 1) == count


NEEDLES = """
about: two probes
probes: [passkey, quote]
buckets: [512]
per_bucket: 1
base: full
variants:
  full: {cache.policy: full}
  streaming: {cache.policy: streaming, cache.top_k_chunks: 6}
  n-grams: {draft: {kind: ngram}}
tables: [acceptance by kind]
"""


def replayed(folder, *options):
    (folder / "needles.yaml").write_text(NEEDLES)
    path = folder / "result.json"
    assert main([str(folder / "needles.yaml"), "--json", str(path), *options]) == 0
    rows = json.loads(path.read_text())["rows"]
    assert [(row["variant"], row["kind"]) for row in rows] == [
        (name, kind) for name in ("full", "streaming", "n-grams") for kind in ("passkey", "quote")
    ]
    return rows


@pytest.mark.usefixtures("_at_root_with_threads_kept")
def test_every_variant_is_replayed_on_every_probe(tmp_path):
    """Also where the target, which is random, would choose nothing of the answer."""
    rows = replayed(tmp_path, "--set", "config=configs/tiny-random.yaml")
    assert all(row["mean_acceptance_length"] >= 1 for row in rows)
    assert all(row["in_view"] is None for row in rows if not row["num_needle_tokens"])
