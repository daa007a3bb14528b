"""The real engine with a death at a moment of choice, and the fake one with much to say."""

import os
import signal
from dataclasses import dataclass, replace
from pathlib import Path

from specextend.decoding.engine import Engine
from specextend.models.loading import load_engine
from tests.cluster.fakes import FakeEngine
from tests.job.conftest import wait_for


class MortalEngine(Engine):
    """Its process is killed at a moment: in the prefill of a document whose neighbours decode already, while all
    of a batch decode, or with a document finished whose result has not left the process.

    The driver has the documents before by then; `note_received` tells it.
    """

    moment: str
    marker: Path
    """A file to leave behind: who finds it lives on."""
    num_decoded = 0
    """Documents that have left the engine."""
    _counted: int = 0

    @property
    def num_steps(self):
        return self._counted

    @num_steps.setter
    def num_steps(self, value):
        self._counted = value
        if self.is_moment(self.progress()):
            self.die()

    def is_moment(self, outputs):
        """True if it is to die with so many tokens of each request."""
        tokens = sorted(outputs.values())
        in_prefill = len(tokens) > 1 and tokens[0] == 0 and tokens[-1] > 0
        decodes = len(tokens) > 1 and tokens[0] > 2
        return (self.moment == "prefill" and in_prefill) or (self.moment == "decoding" and decodes)

    def generate(self, source, on_error=None):
        for number, completion in enumerate(super().generate(source, on_error)):
            if self.moment == "finished" and number == 2:
                self.die()
            self.num_decoded += 1
            yield completion

    def die(self):
        received = received_beside(self.marker)
        wait_for(lambda: self.marker.exists() or received.stat().st_size >= self.num_decoded, "results")
        if not self.marker.exists():
            self.marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def received_beside(marker):
    """A file with a byte for each document that the driver has."""
    return marker.with_name("received")


def note_received(screen, marker):
    """Let a mortal engine know which documents the driver has."""
    received = received_beside(marker)
    received.touch()

    def note(name, facts):
        if name == "document_done":
            with received.open("a") as file:
                file.write(".")

    screen.on_event = note


@dataclass(frozen=True)
class DiesOnce:
    """Makes engines, the first of which is mortal."""

    moment: str
    marker: Path

    def __call__(self, config):
        engine = load_engine(config)
        del engine.__dict__["num_steps"]
        engine.__class__ = MortalEngine
        engine.moment = self.moment
        engine.marker = self.marker
        return engine


class WordyEngine(FakeEngine):
    """Its summaries are a MiB and more."""

    def completion(self, running):
        completion = running.completion()
        return replace(completion, text=completion.text + "." * (1 << 20))
