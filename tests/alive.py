"""What is alive in this process, so that a test can tell that a request left nothing behind."""

import gc
import weakref
from collections import Counter
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from specextend.decoding.cache import Region
from specextend.decoding.engine import Engine
from tests.tiny_models import random_prompt, request

HELD_BY_CALLERS = ("specextend.core", "specextend.stats")


def alive():
    """Count the tensors, and the objects of each of our classes but those that a caller gives or gets."""
    gc.collect()
    counts = Counter(map(type, gc.get_objects()))
    return Counter({kind: count for kind, count in counts.items() if _is_counted(kind)})


def _is_counted(kind):
    module = str(kind.__module__)  # a few types of third parties have something else than a string
    return issubclass(kind, torch.Tensor) or (module.startswith("specextend.") and module not in HELD_BY_CALLERS)


@dataclass(frozen=True)
class Fresh:
    """An engine that no request has touched since."""

    engine: Engine
    num_rows: int
    objects: Counter[type]

    def assert_nothing_is_left(self, batch=1, cancelled="probe"):
        """Memory is as it was, all rows are one gap again, all slots can be taken, and no name is cancelled still."""
        rows = self.engine.target.cache.rows
        assert self.engine.num_active == 0
        assert self.engine.progress() == {}
        assert alive() == self.objects
        whole = rows.take(self.num_rows)
        assert whole == Region(0, self.num_rows)
        assert rows.take(1) is None
        rows.give_back(whole)
        assert self.most_at_once([cancelled, *map(str, range(batch))]) == batch

    def most_at_once(self, names):
        """Run a short request of each name to its end; return how many the engine took before its first step."""
        taken = []

        def source():
            for name in names:
                taken.append(self.engine.num_active)
                yield request(name, random_prompt(5), 8)

        assert sorted(each.request_id for each in self.engine.generate(source())) == sorted(names)
        return max(taken) + 1


def fresh(engine):
    return Fresh(engine, engine.target.cache.rows.num_free, alive())


class Live(TorchDispatchMode):
    """Counts the bytes of tensors that are alive, on a device without memory; what was there before does not count."""

    def __init__(self):
        super().__init__()
        self.now = self.most = 0

    def __torch_dispatch__(self, operator, types, args=(), kwargs=None):
        results = operator(*args, **(kwargs or {}))
        given = {x.untyped_storage()._cdata for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        for made in tree_leaves(results):
            if isinstance(made, torch.Tensor) and (storage := made.untyped_storage())._cdata not in given:
                self.now += storage.nbytes()
                self.most = max(self.most, self.now)
                weakref.finalize(storage, self._free, storage.nbytes())
        return results

    def _free(self, num_bytes):
        self.now -= num_bytes
