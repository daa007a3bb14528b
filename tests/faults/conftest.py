"""The corpus of the contract, driven from this process, with engines that do what a fault does to real ones."""

from dataclasses import dataclass, field

import pytest

from specextend.cluster.exits import Interrupt
from specextend.cluster.lifecycle import run_job
from specextend.config import RunConfig
from specextend.models.loading import load_engine
from tests.cluster.conftest import Screen
from tests.cluster.conftest import job as job  # as here: a fixture of this folder, too
from tests.contract.conftest import Run
from tests.contract.conftest import kept_kernels as kept_kernels
from tests.contract.conftest import summarize_here as summarize_here
from tests.contract.conftest import undisturbed as undisturbed
from tests.faults.nodes import nodes as nodes
from tests.job.conftest import CONFIG, kept_handlers


@dataclass
class RealJob(Run):
    """The corpus through the tiny pair, or through what a factory makes of it."""

    screen: Screen = field(default_factory=Screen)

    def run(self, factory=load_engine, **job):
        config = RunConfig.load(CONFIG, self.settings(**job))
        return run_job(
            config, self.screen, Interrupt(600.0), report=lambda *arguments, **options: None, factory=factory
        )


@pytest.fixture
def real_job(tmp_path, summarize_here):
    with kept_handlers():
        yield RealJob(tmp_path)


def during(run, *actions, num_done=0):
    """Once so many rows are done, do one after the other, each when the driver next looks and the one before is done.

    False means that it cannot be done yet.
    """
    waiting = list(actions)

    def look(snapshot):
        if waiting and snapshot.num_done >= num_done and waiting[0]() is not False:
            waiting.pop(0)

    run.screen.on_show = look
