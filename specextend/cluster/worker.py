"""The worker: a Ray actor with an engine. Calls bring leases; a thread decodes them in batches."""

import asyncio
import gc
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
from specextend.models.loading import GIB
from specextend.models.pairing import check_files
from specextend.requests.rounds import DecodedRow, Inbox, Summary, TimedOutcome, as_document_error
from specextend.requests.tasks import Task, answer, finished_row, tasks_of
from specextend.terminal import wrap_streams

ENGINE_EXIT_CODE = 70
"""Exit code after a failure of the engine or the GPU."""


RequestOutcome = Completion | DocumentError
EngineFactory = Callable[[RunConfig], Engine]


def checked_engine(config: RunConfig, factory: EngineFactory, hashes: Mapping[str, str]) -> Engine:
    """Build an engine if the local model files match the driver's `hashes`. Raises ModelError."""
    check_files(config.target, config.active_draft, hashes)
    return factory(config)


class Worker:
    """Holds an engine and decodes leases. `WorkerActor` turns it into an actor."""

    _engine: Engine
    _tasks: list[Task]

    def __init__(self, config: RunConfig, source: Source, factory: EngineFactory):
        # Ray shows workers' output on the driver's terminal, quoted text included
        wrap_streams()
        self._config = config
        self._source = source
        self._factory = factory
        self._inbox = Inbox()
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="reader")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[RequestOutcome]] = {}
        self._decoded: Counter[str] = Counter()
        """Output tokens of a lease's finished requests."""
        # neither settled nor cancelled
        self._handed_out: dict[str, Request] = {}
        self._name = f"{os.uname().nodename}:{os.getpid()}"

    async def ready(self) -> WorkerInfo:
        """Load the models and describe the worker."""
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
        """Load the models and start the engine thread; return device and `Engine.limits`."""
        gc.freeze()  # scanning imported objects takes half a second
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
        """Read and decode the document of a lease. Cancelling the call stops it between two steps.

        Args:
            alone: Decode the requests one by one, to isolate a failure.
            earlier: Answers of an earlier start, if only some tasks are repeated.
        """
        received = time.monotonic()
        self._loop = loop = asyncio.get_running_loop()
        in_reader = partial(loop.run_in_executor, self._reader)
        try:
            row = await in_reader(self._read_row, key)
            document = await in_reader(DecodedRow, answer(self._tasks, row, lease_id, earlier))
            while requests := document.requests:
                if alone:
                    outcomes = [await self._decode(request) for request in requests]
                else:
                    outcomes = await asyncio.gather(*map(self._decode, requests))
                for outcome, _ in outcomes:
                    if isinstance(outcome, SuspectedError):
                        return outcome
                await in_reader(document.advance, outcomes)
        except DocumentError as error:
            return error
        finally:
            self._decoded.pop(lease_id, None)
        summary = document.state
        if not isinstance(summary, Summary):
            assert isinstance(summary, DocumentError), "all rounds are done"
            return with_document(summary, row)
        times = {"received": received, "ended": document.ended}
        make = partial(
            finished_row, self._config, row, summary, **times, worker=self._name, attempts=attempt
        )
        made = await loop.run_in_executor(None, make)
        return Done(made, summary.completion.stats, peak_bytes() / GIB, self._engine.speedup)

    async def progress(self) -> WorkerReport:
        """Return the steps, and the output tokens of started leases."""
        outputs = Counter(self._decoded)
        for request_id, num_tokens in self._engine.progress().items():
            outputs[request_id.partition(":")[0]] += num_tokens
        return WorkerReport(self._engine.num_steps, dict(outputs))

    def _read_row(self, key: DocumentKey) -> Row:
        try:
            return self._source.read(key)
        except (InputError, *DAMAGED) as error:
            raise DocumentError(type(error).__name__, str(error), retryable=True) from error

    async def _decode(self, request: Request) -> TimedOutcome:
        future: asyncio.Future[RequestOutcome] = asyncio.get_running_loop().create_future()
        self._waiting[request.request_id] = future
        self._inbox.put(request)
        try:
            return await future, time.monotonic()
        except asyncio.CancelledError:
            if not self._inbox.remove(request.request_id):
                self._engine.cancel(request.request_id)
            raise
        finally:
            self._waiting.pop(request.request_id, None)
            self._handed_out.pop(request.request_id, None)

    def _serve(self) -> None:
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
                if request.request_id not in self._waiting:  # cancelled meanwhile
                    self._handed_out.pop(request.request_id, None)
            yield request

    def _on_batch_error(self, error: BatchError) -> None:
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
        _exit_on_device_error(error)
        self._settle(request_id, as_document_error(error))

    def _settle(self, request_id: str, outcome: RequestOutcome) -> None:
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
    if is_device_error(error):
        _end_process(error)


def _end_process(error: BaseException) -> None:
    traceback.print_exception(error, file=sys.stderr)
    sys.stderr.flush()
    os._exit(ENGINE_EXIT_CODE)
