"""What a decoding step asks of PyTorch: operators, and the moments at which a GPU and its host would wait."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest
from torch.utils._python_dispatch import TorchDispatchMode

from specextend.drafters.causal import CausalDrafter

VIEWS = {
    *("alias", "as_strided", "detach", "detach_", "diagonal", "expand", "lift_fresh", "permute", "select", "slice"),
    *("split", "split_with_sizes", "squeeze", "t", "transpose", "unbind", "unfold", "unsqueeze", "view"),
    *("_unsafe_view", "_reshape_alias", "_local_scalar_dense"),
}
"""Operators that start no kernel."""


@dataclass(slots=True)
class StepTrace:
    """Counts of one step, from a proposal to the next."""

    num_sequences: int
    operators: Counter[str] = field(default_factory=Counter)
    """Kernels around the models: trees, acceptance, caches and plans."""
    num_uploads: int = 0
    """Tensors made of Python's values."""


class Tracer(TorchDispatchMode):
    """Counts operators; those of models are only searched for uploads."""

    def __init__(self):
        super().__init__()
        self.steps = [StepTrace(0)]
        """The first counts what is before the first proposal."""
        self.in_model = False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with self:
            if (result := func.decompose(*args, **kwargs)) is not NotImplemented:
                return result
        name = func.overloadpacket.__name__
        step = self.steps[-1]
        step.num_uploads += name == "lift_fresh"
        if not self.in_model and name not in VIEWS:
            step.operators[name] += 1
        return func(*args, **kwargs)

    def leaving_out(self, function):
        """Wrap a method of a model, whose operators do not count."""

        def called(*args, **kwargs):
            before = self.in_model
            self.in_model = True
            result = function(*args, **kwargs)
            self.in_model = before
            return result

        return called

    def beginning_steps(self, propose):
        """Wrap a drafter's `propose`, with which a step begins."""

        def proposing(slots, *num_nodes):
            self.steps.append(StepTrace(len(slots)))
            return propose(slots, *num_nodes)

        return proposing


@contextmanager
def tracing(engine, tracer):
    """Trace what an engine with a causal draft runs inside the block."""
    drafter = engine.drafter
    assert isinstance(drafter, CausalDrafter)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(drafter, "propose", tracer.beginning_steps(drafter.propose))
        for model, name in ((engine.target, "forward_with_features"), (drafter.network, "forward")):
            patch.setattr(model, name, tracer.leaving_out(getattr(model, name)))
        for model in (engine.target, drafter.network):
            patch.setattr(model, "logits", tracer.leaving_out(model.logits))
        with tracer:
            yield tracer
