"""The worker: a Ray actor with one engine. Leases come in as calls, and one thread decodes them in
batches.
"""

import asyncio
import gc
import math
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import ray
import torch

from specextend.cluster.messages import (
    Done,
    Outcome,
    SuspectedError,
    WorkerInfo,
    WorkerReport,
    with_document,
)
from specextend.config import RunConfig
from specextend.core import Completion, DocumentKey, Request, first_line
from specextend.data.commits import Earlier
from specextend.data.inputs import DocumentError, InputError
from specextend.data.parquet import DAMAGED
from specextend.data.rows import Row
from specextend.data.source import Source
from specextend.decoding.device import device_name, is_device_error, peak_bytes
from specextend.decoding.engine import BatchError, Engine
from specextend.document_requests import (
    Inbox,
    Summary,
    Task,
    advance,
    answer,
    as_document_error,
    finished_row,
    tasks_of,
)
from specextend.loading import GIB
from specextend.pairing import check_files
from specextend.terminal import wrap_streams

ENGINE_EXIT_CODE = 70
"""Exit code of a worker whose engine has failed as a whole, or whose GPU context is beyond use."""


RequestOutcome = Completion | DocumentError
EngineFactory = Callable[[RunConfig], Engine]


def checked_engine(config: RunConfig, factory: EngineFactory, hashes: Mapping[str, str]) -> Engine:
    """Make an engine, unless the model files on this machine are not those that the driver has
    recorded.

    hashes: of the run's models, by `target`, `tokenizer` and `draft`. Raises ModelError.
    """
    check_files(config.target, config.active_draft, hashes)
    return factory(config)


class Worker:
    """Holds an engine and answers `run` with a document's outcome. `WorkerActor` makes it an
    actor.
    """

    _engine: Engine
    _tasks: list[Task]

    def __init__(self, config: RunConfig, source: Source, factory: EngineFactory):
        """Load nothing yet: the driver has to know when loading begins."""
        # Ray shows on the driver's terminal what a worker writes, such as an error that quotes a
        # text
        wrap_streams()
        self._config = config
        self._source = source
        self._factory = factory
        self._inbox = Inbox()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[RequestOutcome]] = {}
        self._decoded: Counter[str] = Counter()
        """Output tokens of a lease's requests that are done, while it needs further ones."""
        # to the engine, and neither settled nor cancelled
        self._handed_out: dict[str, Request] = {}
        self._name = f"{os.uname().nodename}:{os.getpid()}"

    async def ready(self) -> WorkerInfo:
        """Load the models. Raises whatever keeps them from loading."""
        device, limits = await asyncio.get_running_loop().run_in_executor(None, self.load)
        context = ray.get_runtime_context()
        given = context.get_accelerator_ids() if self._config.job.gpus_per_worker else {}
        accelerators = tuple(
            f"{kind} {number}"
            for kind, numbers in sorted(given.items())
            for number in sorted(numbers)
        )
        kernels = [
            {"name": each.name, "taken": each.taken, "why": each.why}
            for each in self._engine.target.trials
        ]
        place = context.get_node_id(), os.uname().nodename, os.getpid()
        return WorkerInfo(*place, device, accelerators, limits, kernels)

    def load(self) -> tuple[str, dict[str, float] | None]:
        """Load the models and start the engine. Returns the name of their device, and its limits
        (`WorkerInfo`).
        """
        gc.freeze()  # what was imported is no garbage, and each search for some takes half a second
        config = self._config
        if not config.job.gpus_per_worker:
            torch.set_num_threads(config.job.num_cores)
        self._engine = engine = self._factory(config)
        self._tasks = tasks_of(config, engine.tokenizer, engine.max_tokens)
        limits = engine.limits()
        threading.Thread(target=self._serve, name="engine", daemon=True).start()
        return device_name(torch.device(config.job.device)), limits

    async def run(
        self,
        lease_id: str,
        key: DocumentKey,
        attempt: int,
        alone: bool = False,
        earlier: Earlier | None = None,
    ) -> Outcome:
        """Read, render and decode the document of a lease. A cancelled call drops its sequences
        between two steps.

        alone: decode one request after the other, so that a failure can be told from a neighbour's.
        earlier: answers of an earlier start, if only some tasks are to be done.
        """
        received = time.monotonic()
        self._loop = loop = asyncio.get_running_loop()
        row: Row | None = None
        try:
            row = await loop.run_in_executor(self._reader, self._read, key)
            summary = await self._summarize(row, lease_id, alone, earlier)
        except SuspectedError as error:
            return error
        except DocumentError as error:
            return with_document(error, row)
        finally:
            self._decoded.pop(lease_id, None)
        times = {"received": received, "ended": time.monotonic()}
        make = partial(
            finished_row, self._config, row, summary, **times, worker=self._name, attempts=attempt
        )
        made = await loop.run_in_executor(None, make)
        return Done(made, summary.completion.stats, peak_bytes() / GIB, self._engine.speedup)

    async def progress(self) -> WorkerReport:
        """Report the step counter, and the output tokens of each lease that has started, finished
        requests included.
        """
        outputs = Counter(self._decoded)
        for request_id, num_tokens in self._engine.progress().items():
            outputs[request_id.partition(":")[0]] += num_tokens
        return WorkerReport(self._engine.num_steps, dict(outputs))

    def _read(self, key: DocumentKey) -> Row:
        try:
            return self._source.read(key)
        except (InputError, *DAMAGED) as error:
            raise DocumentError(type(error).__name__, str(error), retryable=True) from error

    async def _summarize(
        self, row: Row, lease_id: str, alone: bool, earlier: Earlier | None
    ) -> Summary:
        """Decode the requests of a document, round by round. Raises DocumentError."""
        loop = asyncio.get_running_loop()
        rounds = answer(self._tasks, row, lease_id, earlier)
        began = math.inf
        outcomes: list[RequestOutcome] | None = None
        while True:
            step = await loop.run_in_executor(self._reader, advance, rounds, outcomes)
            if isinstance(step, DocumentError):
                raise step
            if isinstance(step, Summary):
                return step.timed(time.monotonic() - began)
            if alone:
                outcomes = [await self._decode(request) for request in step]
            else:
                outcomes = await asyncio.gather(*map(self._decode, step))
            for outcome in outcomes:
                if isinstance(outcome, SuspectedError):
                    raise outcome
                if isinstance(outcome, Completion):
                    began = min(began, time.monotonic() - outcome.stats.total_s)

    async def _decode(self, request: Request) -> RequestOutcome:
        """Queue a request and wait for its outcome."""
        future: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._inbox.put(request)
        try:
            return await future
        except asyncio.CancelledError:
            if not self._inbox.remove(request.request_id):
                self._engine.cancel(request.request_id)
            raise
        finally:
            self._waiting.pop(request.request_id, None)
            self._handed_out.pop(request.request_id, None)

    def _serve(self) -> None:
        """Run the engine thread."""
        try:
            while True:
                try:
                    for completion in self._engine.generate(self._requests(), self._on_error):
                        self._settle(completion.request_id, completion)
                except BatchError as error:
                    _exit_on_device_error(error.__cause__ or error)
                    self._on_batch_error(error)
        except BaseException as error:
            _end_process(error)
            raise

    def _requests(self) -> Iterator[Request | None]:
        while True:
            request = self._inbox.take(block=self._engine.num_active == 0)
            if request is not None:
                self._handed_out[request.request_id] = request
                if request.request_id not in self._waiting:  # cancelled before it was noted there
                    self._handed_out.pop(request.request_id, None)
            yield request

    def _on_batch_error(self, error: BatchError) -> None:
        """Suspect the requests that were in the batch, and queue those again that had not begun."""
        cause = error.__cause__ or error
        traceback.print_exception(cause, file=sys.stderr)
        failure = SuspectedError(type(cause).__name__, first_line(cause), "decode", retryable=True)
        for name in error.request_ids:
            self._settle(name, failure)
        for request in list(self._handed_out.values()):
            if request.request_id in self._waiting:  # not cancelled since
                self._inbox.put(request)
        self._handed_out.clear()

    def _on_error(self, request_id: str, error: Exception) -> None:
        """Settle a request that failed alone: it becomes an error row, and the engine goes on."""
        _exit_on_device_error(error)
        self._settle(request_id, as_document_error(error))

    def _settle(self, request_id: str, outcome: RequestOutcome) -> None:
        """Hand an outcome to the call that waits for it, on the loop's thread."""
        self._handed_out.pop(request_id, None)
        assert self._loop is not None
        self._loop.call_soon_threadsafe(self._resolve, request_id, outcome)

    def _resolve(self, request_id: str, outcome: RequestOutcome) -> None:
        future = self._waiting.get(request_id)
        if future is not None and not future.done():
            future.set_result(outcome)
            if isinstance(outcome, Completion):
                lease_id = request_id.partition(":")[0]
                self._decoded[lease_id] += outcome.stats.num_output_tokens


def _exit_on_device_error(error: BaseException) -> None:
    """End the process after an error that makes every later call on the device fail, too."""
    if is_device_error(error):
        _end_process(error)


def _end_process(error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(ENGINE_EXIT_CODE)
