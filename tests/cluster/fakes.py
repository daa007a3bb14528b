"""An engine without a model: it does what the document tells it to, a token a step."""

import os
import re
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import torch
from safetensors.torch import load_file, save_file

from specextend.core import Completion
from specextend.decoding.engine import BatchError
from specextend.models.causal_lm import load_tokenizer
from specextend.stats import DecodingStats

STEP_S = 0.01
ORDERS = re.compile(r"(?<!\w)(raise|oom|kill|crawl)(?!\w)(?:([:@])([^\s<]+))?")


class FakeEngine:
    """Words in a document that it obeys, in each step: `raise`, `oom`, `kill`, `crawl`.

    As in the real engine, a failure in a batch cannot be told from a neighbour's.

    `<word>:<path>` obeys only while there is no file at that path, and leaves one; `<word>@<path>` while there is one.
    """

    def __init__(self, config):
        self.tokenizer = load_tokenizer(config.target.model)
        self.num_steps = 0
        self.speedup = None
        self.max_tokens = 4096
        self._size = config.decoding.max_batch_size
        self._active = {}
        self._cancelled = set()
        self._lock = threading.Lock()

    @property
    def num_active(self):
        return len(self._active)

    target = SimpleNamespace(trials=())

    def limits(self):
        """It has no model, so it has no limits."""

    def cancel(self, request_id):
        with self._lock:
            self._cancelled.add(request_id)

    def progress(self):
        with self._lock:
            return {name: running.num_tokens for name, running in self._active.items()}

    def generate(self, source, on_error=None):
        assert on_error is not None
        requests = iter(source)
        while True:
            while len(self._active) < self._size and (request := next(requests)) is not None:
                with self._lock:
                    self._active[request.request_id] = _Running(request, self.tokenizer)
            time.sleep(STEP_S)
            with self._lock:
                for name in self._cancelled & self._active.keys():
                    del self._active[name]
                self._cancelled.clear()
            yield from self._step(on_error)
            self.num_steps += 1

    def _step(self, on_error):
        for name, running in list(self._active.items()):
            try:
                running.obey()
            except (ValueError, torch.OutOfMemoryError) as error:
                batch = list(self._active)
                with self._lock:
                    self._active.clear()
                if len(batch) > 1:
                    raise BatchError(batch, error) from error
                on_error(name, error)
                return
            running.num_tokens += not running.crawls
            if running.num_tokens >= running.request.max_new_tokens:
                with self._lock:
                    del self._active[name]
                yield self.completion(running)

    def completion(self, running):
        return running.completion()


class MissingEngine(FakeEngine):
    """Has a draft of which hardly anything is accepted."""

    def completion(self, running):
        completion = super().completion(running)
        completion.stats.num_network_steps = 4
        completion.stats.num_first_accepted = 1
        return completion


class LosingEngine(FakeEngine):
    """Finds after its first document that drafts lose."""

    def completion(self, running):
        self.speedup = 0.93
        return super().completion(running)


class QuotingEngine(FakeEngine):
    """Waits for a second document and fails over both, as a library does that quotes the text it was given; once."""

    has_failed = False

    def _step(self, on_error):
        if self.has_failed:
            yield from super()._step(on_error)
        elif len(batch := list(self._active)) > 1:
            self.has_failed = True
            with self._lock:
                self._active.clear()
            quote = ValueError("cannot read \x1b[2J\u202ethis\rok")
            raise BatchError(batch, quote) from quote


class _Running:
    def __init__(self, request, tokenizer):
        self.request = request
        self.text = tokenizer.decode(request.prompt_token_ids)
        self.num_tokens = 0
        self.crawls = False
        self.began = time.monotonic()

    def obey(self):
        self.crawls = False
        for order, when, path in ORDERS.findall(self.text):
            if when and Path(path).exists() == (when == ":"):
                continue
            if when:
                Path(path).touch()
            self.do(order)

    def do(self, order):
        match order:
            case "raise":
                raise ValueError("this document cannot be done")
            case "oom":
                raise torch.OutOfMemoryError("out of memory on this document")
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "crawl":
                self.crawls = True

    def completion(self):
        seconds = time.monotonic() - self.began
        stats = DecodingStats(
            num_prompt_tokens=len(self.request.prompt_token_ids),
            num_output_tokens=self.num_tokens,
            num_plain_steps=self.num_tokens - 1,
            ttft_s=STEP_S,
            decode_s=max(0.0, seconds - STEP_S),
            prefill_s=STEP_S,
            verify_s=max(0.0, seconds - STEP_S),
        )
        text = f"seed {self.request.sampling.seed}: {len(self.text)} characters"
        return Completion(self.request.request_id, [1] * self.num_tokens, text, "length", stats)


class NeverLoads:
    """A model that is not there."""

    def __call__(self, config):
        raise FileNotFoundError("the weights are gone")


class SwapsWeights:
    """A model whose files are replaced once it is loaded: somebody copies the next version over it."""

    def __init__(self, weights):
        self.weights = weights

    def __call__(self, config):
        tensors = {name: tensor * 2 for name, tensor in load_file(self.weights).items()}
        save_file(tensors, self.weights, {"format": "pt"})
        return FakeEngine(config)
