"""OPT-Tree against brute force on lookup-table models, whose next-token probabilities depend on the whole path."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specextend.decoding.decoding_options import TreeOptions
from specextend.decoding.tree import grow_trees
from tests.covering import covering


def random_table(seed, vocab_size=4, sharpness=2.0):
    """Make the function from a path of token ids after the root to logits [V]."""

    def logits(path):
        generator = torch.Generator().manual_seed(hash((seed, *path)) % 2**31)
        return torch.randn(vocab_size, generator=generator) * sharpness

    return logits


class TableDraft:
    """Runs the lookup tables of a batch as a draft network would: it knows a node's path by the mask alone."""

    def __init__(self, tables):
        self.tables = tables
        self.expanded = torch.zeros(len(tables), 0, dtype=torch.int64)
        self.num_calls = 0

    def root_logits(self):
        return torch.stack([table(()) for table in self.tables])

    def expand(self, token_ids, slots, mask, depth):
        self.num_calls += 1
        self.expanded = torch.cat([self.expanded, token_ids], 1)
        assert mask.sum(-1).eq(depth).all(), "one ancestor a level, and itself"
        every = zip(self.tables, self.expanded, mask, strict=True)
        return torch.stack([self._rows(*each) for each in every])

    @staticmethod
    def _rows(table, expanded, mask):
        return torch.stack([table(tuple(expanded[visible].tolist())) for visible in mask])


def grow(tables, options, *, adaptive=True):
    draft = TableDraft(tables)
    roots = torch.arange(len(tables)) + 100
    trees = grow_trees(
        roots, draft.root_logits(), draft.expand, options, least_gain=options.threshold if adaptive else None
    )
    return trees, draft


def weights_of(tree):
    """Path -> log probability of every node but the root, after checking the tree's form."""
    parents = tree.parents.tolist()
    token_ids = tree.token_ids.tolist()
    assert parents[0] == -1
    assert tree.depths[0] == 0
    paths = [()]
    for node in range(1, len(parents)):
        assert 0 <= parents[node] < node, "parents come first"
        paths.append((*paths[parents[node]], token_ids[node]))
        assert tree.depths[node] == len(paths[-1])
    assert len(set(paths)) == len(paths), "no node twice"
    return dict(zip(paths[1:], tree.log_probs[1:].tolist(), strict=True))


def brute_force(table, options):
    """The likeliest nodes of all there are down to the depth."""
    weights = {(): 0.0}
    for depth in range(options.depth):
        for path in [path for path in weights if len(path) == depth]:
            for token_id, log_prob in enumerate(table(path).log_softmax(-1).tolist()):
                weights[(*path, token_id)] = weights[path] + log_prob
    del weights[()]
    best = sorted(weights, key=lambda path: -weights[path])[: options.nodes]
    return {path: weights[path] for path in best}


@pytest.mark.parametrize("seed, depth, nodes", covering(range(4), [1, 2, 4], [1, 2, 5, 16, 50]))
def test_the_tree_is_the_best_nodes_of_all(seed, depth, nodes):
    """Nothing is lost by expanding only nodes among the best so far; the last level is used, too."""
    table = random_table(seed)
    options = TreeOptions(nodes=nodes, depth=depth, threshold=0)
    [tree], _ = grow([table], options)
    assert weights_of(tree) == pytest.approx(brute_force(table, options), abs=1e-4)


@settings(max_examples=60)
@given(
    seeds=st.lists(st.integers(0, 99), min_size=1, max_size=3),
    nodes=st.integers(1, 20),
    depth=st.integers(1, 5),
    sharpness=st.sampled_from([0.0, 0.5, 3.0, 30.0]),
)
def test_fixed_shapes_give_the_adaptive_tree(seeds, nodes, depth, sharpness):
    """What a captured graph drafts is what a CPU drafts, when no threshold stops the latter; with ties, too."""
    tables = [random_table(seed, sharpness=sharpness) for seed in seeds]
    options = TreeOptions(nodes=nodes, depth=depth, threshold=0)
    adaptive, _ = grow(tables, options)
    fixed, draft = grow(tables, options, adaptive=False)
    assert draft.num_calls == depth - 1
    for a, b in zip(adaptive, fixed, strict=True):
        assert weights_of(a) == weights_of(b)
        assert torch.equal(a.parents, b.parents)


@pytest.mark.parametrize("threshold, num_levels", [(0.6, 2), (0.3, 2), (0.2, 3), (0.1, 4), (0.0, 6)])
def test_drafting_stops_when_a_level_gains_too_little(threshold, num_levels):
    """Level d + 1 of this chain adds 0.5^(d + 1): the first that adds less than the threshold is the last."""
    options = TreeOptions(nodes=6, depth=6, threshold=threshold)
    table = lambda path: torch.tensor([0.5, *[0.5 / 999] * 999]).log()  # noqa: E731
    _, draft = grow([table], options)
    assert draft.num_calls == num_levels - 1
