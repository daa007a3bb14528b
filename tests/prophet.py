"""A draft that knows what the target will say."""

from random import Random

import torch

from specextend.decoding.tree import Drafter, DraftTrees, TreeNode
from tests.tiny_models import VOCABULARY


class Prophet(Drafter):
    """Drafts what the target will say, now and then something else, with siblings that no chain has."""

    num_levels = 4

    def __init__(self, outputs, hidden_layers=None):
        """Take the output of each length of a prompt, and the layers of the target whose features are kept."""
        self.hidden_layers = hidden_layers
        self.features = []
        self._outputs = outputs
        self._random = Random(0)
        self._said = {}

    def admit(self, slot, num_prompt_tokens, max_new_tokens):
        self._said[slot] = self._outputs[num_prompt_tokens], 0
        return True

    def prefill(self, slot, token_ids, hidden):
        self.features.append(hidden)

    def absorb(self, slots, decided):
        self.features.append(decided.features[0, : len(decided.token_ids[0])])

    def read(self, slot, token_ids):
        output, count = self._said[slot]
        self._said[slot] = output, count + len(token_ids)

    def propose(self, slots, num_drafts=None):
        return DraftTrees.pad([self._tree(*self._said[slot]) for slot in slots], torch.device("cpu"))

    def _tree(self, output, count):
        nodes = [TreeNode(-1, output[count - 1], 0, 0.0)]
        parent = 0
        for depth, token_id in enumerate(output[count : count + self._random.randint(0, 4)], 1):
            wrong = (token_id + 1) % VOCABULARY
            if self._random.random() < 0.2:
                token_id, wrong = wrong, token_id
            nodes += [TreeNode(parent, token_id, depth, -0.1 * depth), TreeNode(parent, wrong, depth, -5.0 * depth)]
            parent = len(nodes) - 2
        return nodes
