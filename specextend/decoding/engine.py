"""The engine decodes a stream of requests in batches. `Engine._step` is a decoding step."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from specextend.attention.plan import TreeAttention
from specextend.core import Asks, Completion, Request
from specextend.decoding.admission import Admission, MemoryLadder, Queue, Work
from specextend.decoding.choices import ChoiceScorer
from specextend.decoding.decoding_options import CacheOptions, TreeOptions
from specextend.decoding.device import (
    Graphs,
    is_out_of_memory,
    make_current,
    release_cached,
    synchronise,
    traits_of,
)
from specextend.decoding.grammar import Grammars
from specextend.decoding.measurements import load_limits
from specextend.decoding.model import CachedModel
from specextend.decoding.prefill import PromptEnd, PromptReader
from specextend.decoding.retrieval import REFRESH_EVERY, CachePolicy, mean_mass, scored_layers
from specextend.decoding.sampling import (
    NOT_FINITE,
    NonFiniteLogits,
    log_probs_of,
    penalties_of,
    where_finite,
)
from specextend.decoding.sequence import RunningSequence, StopChecker, Stopwatch, choose
from specextend.decoding.speculation import Adaptive, Payoff
from specextend.decoding.tree import Decided, Drafter, DraftTrees, among_roots, prune, roots_only
from specextend.decoding.verification import Verified, Verifier

OnError = Callable[[str, Exception], None]
TIMED_EVERY = 16
"""Captured steps per timed step, which waits for the device after each phase."""


class BatchError(RuntimeError):
    """A step of several sequences failed, and the engine dropped all of them."""

    def __init__(self, request_ids: list[str], error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.request_ids = request_ids


class Engine:
    """Decodes requests. Between calls of `generate` it keeps only weights and buffers."""

    def __init__(
        self,
        tokenizer: Any,
        target: CachedModel,
        drafter: Drafter | None,
        *,
        eos_token_ids: frozenset[int],
        max_tokens: int,
        max_batch_size: int,
        tree: TreeOptions,
        tree_attention: TreeAttention,
        cache: CacheOptions,
        adaptive: Adaptive | None = None,
        graphs: Graphs | None = None,
        asks: Asks | None = None,
    ):
        """Take the models and their options.

        Args:
            drafter: Draft; None: all steps are plain.
            max_tokens: Largest sum of prompt and output tokens.
            adaptive: Cuts trees and pauses drafts; None: every step verifies whole trees.
            asks: Defaults of requests without penalties.
        """
        assert drafter is not None or adaptive is None, "without a draft there is nothing to adapt"
        traits = traits_of(target.device)
        self.tokenizer = tokenizer
        self.target = target
        self.drafter = drafter or Drafter()
        self.max_tokens = max_tokens
        self.num_steps = 0
        """Prefill chunks and decoding steps, as a sign of progress."""
        self.decode_share = traits.decode_share
        """Share of the time for running sequences while a prompt is read."""
        self._eos_token_ids, self._asks = eos_token_ids, asks or Asks()
        self._cache_options = cache
        sizes = tree.most_drafts, max_tokens, max_batch_size
        self._admission = Admission(target.cache, self.drafter, *sizes)
        num_drafts = tree.most_drafts if drafter else 0
        self._memory = MemoryLadder(max_batch_size, num_drafts, traits.prefill_chunk)
        self._graphs = graphs or Graphs()
        self._watch = Stopwatch()
        scored = scored_layers(cache, target.layers) if drafter else ()
        parts = target, self.drafter, adaptive, self._graphs, self._memory, self._watch
        self._drafting = Drafting(*parts, cache, scored)
        self._tree_attention = tree_attention
        layers = self.drafter.hidden_layers, scored, self.drafter.num_levels
        self._verifier = Verifier(target, *layers, tree_attention, self._graphs)
        self._choices = ChoiceScorer(tokenizer, target, self._count_step)
        self._grammars = Grammars(tokenizer, eos_token_ids, target.config.vocab_size)
        self._reader = PromptReader(target, self.drafter, scored, self._watch, self._count_step)
        self._lock = threading.Lock()
        self._active: dict[str, RunningSequence] = {}
        self._reading: RunningSequence | None = None
        self._owed_s = 0.0
        """Seconds due to running sequences before the next chunk of a prompt."""
        self._cancelled: set[str] = set()

    def limits(self) -> dict[str, float] | None:
        """Return the device's limits (`measure_limits`) and the target's work (`ModelWork`).

        No request may be running. None: no memory is left for the measurement.
        """
        try:
            limits = load_limits(self.target.device, self.target.dtype)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            release_cached(self.target.device)
            return None
        return limits | asdict(self.target.work)

    @property
    def speedup(self) -> float | None:
        """Speed of the last trial's documents over plain decoding; None before its end."""
        return self._drafting.payoff.speedup

    @property
    def num_active(self) -> int:
        """Number of sequences in the engine."""
        return len(self._active)

    def cancel(self, request_id: str) -> None:
        """Drop a request between two steps. Any thread may call this."""
        with self._lock:
            self._cancelled.add(request_id)

    def progress(self) -> dict[str, int]:
        """Return each active request's output tokens so far. Any thread may call this."""
        with self._lock:
            return {
                name: sequence.stats.num_output_tokens for name, sequence in self._active.items()
            }

    def generate(
        self, source: Iterable[Request | None], on_error: OnError | None = None
    ) -> Iterator[Completion]:
        """Decode requests and yield each completion when it is finished.

        After memory ran out, the requests of the failed work start again with smaller sizes. They
        fail if no size can be lowered.

        Args:
            source: Requests. It yields None while it has none, and may block only while the engine
                is idle. The engine asks for a request only if the batch has room.
            on_error: Called with the id and the exception of a request that fails without
                neighbours; None: the exception is raised.

        Yields:
            Completions, in the order of their ends.

        Raises:
            ValueError: A request can never fit, and `on_error` is None.
            BatchError: A step of several sequences failed, and `on_error` is given.
        """
        assert not self._active, "one generate at a time"
        make_current(self.target.device)
        queue = Queue(iter(source))
        self._memory.start()
        try:
            while True:
                self._admit(queue, on_error)
                self._drop_cancelled(queue)
                self._take_turn(queue, on_error)
                for completion in self._finished(on_error):
                    yield completion
                    self._watch.restart()  # the caller's time is not charged to a request
                if not self._active and queue.exhausted:
                    return
        finally:
            for sequence in list(self._active.values()):
                self._leave(sequence)
            self._cancelled.clear()
            self._reader.forget()
            self._owed_s = 0.0

    def _take_turn(self, queue: Queue, on_error: OnError | None) -> None:
        """Read a chunk of a prompt, or step running sequences for their share of the time.

        A doubted sequence steps without the others.
        """
        begin = self._watch.mark
        running = [sequence for sequence in self._active.values() if sequence is not self._reading]
        running = [sequence for sequence in running if sequence.is_doubted][:1] or running
        if self._reading is not None and not (running and self._owed_s > 0):
            self._guard("prefill", [self._reading], queue, on_error)
            self._owed_s = (self._watch.mark - begin) * self.decode_share / (1 - self.decode_share)
        elif running:
            self._guard("step", running, queue, on_error)
            self._owed_s -= self._watch.mark - begin

    def _admit(self, queue: Queue, on_error: OnError | None) -> None:
        while (
            self._reading is None
            and len(self._active) < self._memory.batch_size
            and (request := queue.peek()) is not None
        ):
            try:
                sequence = self._start(request)
            except ValueError as error:
                if on_error is None:
                    raise
                on_error(request.request_id, error)
                queue.pop()
                continue
            if sequence is None:
                return
            queue.pop()
            sequence.stats.num_memory_retries = queue.num_retries.pop(request.request_id, 0)
            self._reading = sequence

    def _start(self, request: Request) -> RunningSequence | None:
        if request.request_id in self._active:
            raise ValueError(
                f"request {request.request_id!r} is running already; give each request an id of "
                "its own"
            )
        self._admission.check(request)
        grammar = (
            self._grammars.begin(request.schema) if request.schema and not request.choices else None
        )
        admitted = self._admission.admit(request)
        if admitted is None:
            assert self._active, "an empty engine has room for whatever passes the check"
            return None
        now = self._watch.charge("other_s", list(self._active.values()))
        stopper = StopChecker(
            self.tokenizer,
            frozenset() if request.sampling.ignore_eos else self._eos_token_ids,
            request.sampling.stop,
            request.max_new_tokens,
            stop_repetition=request.sampling.stop_repetition,
        )
        policy = CachePolicy(self._cache_options)
        penalties = penalties_of(request, self.target.device, self._asks)
        drafts = self._drafting.is_wanted(request)
        sequence = RunningSequence(
            request, *admitted, stopper, policy, now, drafts, penalties, grammar
        )
        self._drafting.admit(sequence, self._active.values())
        with self._lock:
            self._active[request.request_id] = sequence
        return sequence

    def _guard(
        self, work: Work, sequences: list[RunningSequence], queue: Queue, on_error: OnError | None
    ) -> None:
        """Do the work. If memory runs out and a size can be lowered, restart the sequences."""
        try:
            with torch.inference_mode():
                if work == "prefill":
                    self._prefill(sequences)
                else:
                    self._step(sequences)
            return
        except Exception as error:
            num_tokens = len(sequences[0].request.prompt_token_ids)
            size = num_tokens if work == "prefill" else len(sequences)
            if not (is_out_of_memory(error) and self._has_less(work, sequences, size)):
                if on_error is None:
                    raise
                self._fail(sequences, error, on_error)
                return
        # only now the exception is gone, and the tensors of the failed forward with it
        for sequence in sequences:
            self._leave(sequence)
            queue.num_retries[sequence.request.request_id] = sequence.stats.num_memory_retries + 1
        queue.give_back([sequence.request for sequence in sequences])
        self._graphs.clear()
        if self._reading is None:
            self._reader.forget()
        release_cached(self.target.device)
        self._watch.restart()

    def _has_less(self, work: Work, sequences: list[RunningSequence], size: int) -> bool:
        """Return True if a restart takes less memory: by a smaller size, or without a draft."""
        still_drafts = self._memory.num_drafts == 0 and any(
            sequence.drafts for sequence in sequences
        )
        return self._memory.lower(work, size, len(self._active)) or still_drafts

    def _fail(self, sequences: list[RunningSequence], error: Exception, on_error: OnError) -> None:
        if len(sequences) > 1:
            raise BatchError(
                [sequence.request.request_id for sequence in sequences], error
            ) from error
        self._leave(sequences[0])
        self._memory.ended()
        if self._reading is None:  # the failed prompt may have left wrong rows
            self._reader.forget()
        on_error(sequences[0].request.request_id, error)

    def _leave(self, sequence: RunningSequence) -> None:
        with self._lock:
            del self._active[sequence.request.request_id]
        if sequence is self._reading:
            self._reading = None
        self._admission.release(sequence.slot, sequence.region)

    def _finished(self, on_error: OnError | None) -> list[Completion]:
        """Release ended sequences; return completions except of broken sequences."""
        done = []
        for sequence in [each for each in self._active.values() if each.has_ended]:
            if sequence.is_broken:
                error = NonFiniteLogits(sequence.stats.num_output_tokens)
                if on_error is None:
                    raise error
                self._fail([sequence], error, on_error)
            else:
                self._leave(sequence)
                self._memory.ended()
                self._drafting.ended(sequence, self._active.values())
                done.append(sequence.completion())
        return done

    def _drop_cancelled(self, queue: Queue) -> None:
        with self._lock:
            dropped = [self._active[name] for name in self._cancelled if name in self._active]
            queue.drop(self._cancelled)
            self._cancelled.clear()
        for sequence in dropped:
            self._leave(sequence)

    def _prefill(self, sequences: list[RunningSequence]) -> None:
        [sequence] = sequences
        request = sequence.request
        end = self._reader.read(sequence, self._memory.chunk_size)
        if end is None:
            synchronise(self.target.device)  # so that the next step is not charged for the chunk
            self._watch.charge("prefill_s", sequences)
            return
        self._reading = None
        if request.choices:
            token_ids, reason = self._choices.answer(sequence)
            sequence.push(token_ids, self._watch.charge("prefill_s", sequences))
            sequence.stopper.finish_reason = reason
            return
        positions = torch.tensor([[sequence.length]], device=self.target.device)
        logits = self.target.logits(end.hidden)
        nodes = request.prompt_token_ids[-1:], [-1]
        chosen = choose([sequence], logits[None], positions, [nodes])[0]
        token_id = int(where_finite(chosen, logits, NOT_FINITE))
        now = self._watch.charge("prefill_s", sequences)
        if token_id == NOT_FINITE:
            sequence.is_broken = True
            return
        if request.keeps_log_probs:
            sequence.log_probs += log_probs_of(logits, [token_id])
        sequence.push([token_id], now)
        self._judge(sequences)
        self._drafting.read_first(sequence, token_id, end)

    def _count_step(self) -> None:
        self.num_steps += 1

    def _step(self, running: list[RunningSequence]) -> None:
        started_at = self._watch.mark
        self._drafting.begin_step(self.num_steps)
        self._watch.charge("other_s", running)
        trees = self._drafting.propose(running)
        begin = self._watch.mark
        step = self._verifier.verify(running, trees)
        self._accept(running, trees, step, begin)
        self._count_step()
        self._drafting.read(running, step)
        for sequence in running:
            scores = bool(sequence.request.closed) and not self.target.is_recurrent
            if scores and sequence.has_ended and not sequence.is_broken:
                self._choices.score(sequence)
                self._watch.charge("verify_s", [sequence])
        self._drafting.payoff.took(self._watch.mark - started_at)
        self._judge(running)

    def _judge(self, sequences: list[RunningSequence]) -> None:
        for sequence in sequences:
            ask = sequence.request.questions
            if ask is not None and sequence.has_ended and not sequence.is_broken:
                questions = ask(sequence.stopper.text, sequence.stopper.token_ids)
                self._reader.overwrite(sequence, questions.num_read - 1)
                self._choices.judge(sequence, questions)
                self._watch.charge("verify_s", [sequence])

    def _accept(
        self, sequences: list[RunningSequence], trees: DraftTrees, step: Verified, begin: float
    ) -> None:
        lengths = [sequence.length for sequence in sequences]
        decided = [*zip(step.new_token_ids, step.is_finite, strict=True)]
        accepted = [len(new) - is_finite for new, is_finite in decided]
        for sequence, size, number, (new, _) in zip(
            sequences, trees.sizes, accepted, decided, strict=True
        ):
            sequence.length += len(new)
            if size > 1 and sequence.speculation.active:
                sequence.count_first(new, number, self.drafter.drafted)
            sizes = size - 1, number, self.drafter.num_levels
            sequence.count_step(
                *sizes, batch_size=len(sequences), hybrid=self._tree_attention == "hybrid"
            )
        now = self._watch.charge("verify_s", sequences)
        self._drafting.observe(sequences, lengths, trees, accepted, now - begin)
        for sequence, (new, is_finite) in zip(sequences, decided, strict=True):
            if new:
                sequence.push(new, now)
            sequence.is_doubted = not is_finite
            sequence.is_broken = not (is_finite or sequence.has_ended) and trees.num_nodes == 1


@dataclass
class Drafting:
    """Proposes trees before a step, and lets the draft read the decided tokens after it."""

    _target: CachedModel
    _drafter: Drafter
    _adaptive: Adaptive | None
    _graphs: Graphs
    _memory: MemoryLadder
    _watch: Stopwatch
    _options: CacheOptions
    _scored_layers: Sequence[int]

    def __post_init__(self) -> None:
        self.payoff = self._adaptive.payoff if self._adaptive else Payoff()
        self._timed_for = self._adaptive
        """Receiver of the step's times; None for an untimed step."""

    def is_wanted(self, request: Request) -> bool:
        """Return True if a request gets a draft."""
        drafts = self.payoff.drafts if request.drafts is None else request.drafts
        return self._memory.num_drafts > 0 and drafts and not request.choices

    def admit(self, sequence: RunningSequence, active: Iterable[RunningSequence]) -> None:
        """Choose whether a sequence begins with a draft or a pause."""
        if not sequence.drafts:
            sequence.speculation.active = False
        elif self._adaptive is not None:
            running = [each for each in active if each.drafts]
            num_tokens = len(sequence.request.prompt_token_ids)
            sequence.speculation = self._adaptive.begin(num_tokens, running)

    def ended(self, sequence: RunningSequence, active: Iterable[RunningSequence]) -> None:
        """Count a finished document. If drafts do not pay, end the active ones."""
        if sequence.request.drafts is None and not sequence.request.choices:
            worth_s = sequence.speculation.worth_s
            self.payoff.ended(sequence.stats, worth_s, drafted=sequence.drafts)
        if not self.payoff.drafts:
            for each in active:
                each.drafts = each.speculation.active = False
                each.undrafted.clear()

    def begin_step(self, number: int) -> None:
        """Decide whether a step is timed; if so, wait for the device."""
        is_timed = not self._graphs.enabled or number % TIMED_EVERY == 0
        self._timed_for = self._adaptive if is_timed else None
        self._wait_if_timed()

    def _wait_if_timed(self) -> None:
        if self._timed_for is not None:
            synchronise(self._target.device)

    def propose(self, sequences: list[RunningSequence]) -> DraftTrees:
        """Return a tree for each sequence. In a plain step it is the root.

        Drafts propose for active sequences, n-grams for pausing ones. Grammars remove forbidden
        nodes and add forced nodes.
        """
        root_ids = [sequence.root_token_id for sequence in sequences]
        trees = roots_only(root_ids, self._target.device)
        if sequences[0].is_doubted or self.payoff.is_plain:
            return trees
        drafting, pausing = (
            [
                b
                for b, each in enumerate(sequences)
                if each.drafts and each.speculation.active == is_active
            ]
            for is_active in (True, False)
        )
        drafted = self._draft([sequences[b] for b in drafting])
        glanced = self._glance([sequences[b] for b in pausing], sequences)
        places = drafting + (pausing if glanced is not None else [])
        if (proposed := self._joined(drafted, glanced)) is not None:
            proposing = [sequences[b] for b in places]
            if self._adaptive is not None:
                lengths = [sequence.length for sequence in sequences]
                proposed = self._adaptive.prune(proposed, proposing, lengths)
            is_whole = places == [*range(len(sequences))]
            trees = proposed if is_whole else among_roots(proposed, places, root_ids)
            self._watch.charge("draft_s", proposing)
        return self._padded(self._constrain(trees, sequences, pausing))

    def _joined(self, drafted: DraftTrees | None, glanced: DraftTrees | None) -> DraftTrees | None:
        if drafted is None or glanced is None:
            return drafted or glanced
        return DraftTrees.pad([*drafted.nodes(), *glanced.nodes()], self._target.device)

    def _padded(self, trees: DraftTrees) -> DraftTrees:
        """Pad trees to a size of captured steps: n-grams and grammars leave any size."""
        if not self._graphs.enabled or trees.num_nodes == 1:
            return trees
        if self._adaptive is None:
            return trees.padded(1 + self._memory.num_drafts)
        return trees.padded(self._adaptive.costs.size_for(trees.num_nodes))

    def _draft(self, drafting: list[RunningSequence]) -> DraftTrees | None:
        if not drafting:
            return None
        begin = self._watch.mark
        most_drafts = max(1, self._memory.num_drafts)
        if self._adaptive is not None:
            most_drafts = min(most_drafts, self._adaptive.most_drafts)
        trees = self._drafter.propose([sequence.slot for sequence in drafting], most_drafts)
        if self._target.is_recurrent:
            trees = trees.chains()
        trees = self._constrain(trees, drafting, range(len(drafting)))
        trees = prune(trees, 1 + self._memory.num_drafts)
        self._wait_if_timed()
        now = self._watch.charge("draft_s", drafting)
        if self._timed_for is not None:
            self._timed_for.costs.observe_draft(
                "propose", len(drafting), now - begin, self._timed_for.width
            )
        return trees

    def _glance(
        self, pausing: list[RunningSequence], running: list[RunningSequence]
    ) -> DraftTrees | None:
        """Propose n-grams, which take no time. Captured steps have no trees of such sizes."""
        if self._adaptive is None or not pausing or self._graphs.enabled:
            return None
        least = self._adaptive.least_probability([sequence.length for sequence in running])
        trees = self._drafter.glance(
            [sequence.slot for sequence in pausing], self._memory.num_drafts, least
        )
        return trees.chains() if trees and self._target.is_recurrent else trees

    def _constrain(
        self, trees: DraftTrees, sequences: list[RunningSequence], places: Sequence[int]
    ) -> DraftTrees:
        if not any(sequences[b].grammar for b in places):
            return trees
        proposed = trees.nodes()
        kept = [*proposed]
        for b in places:
            if (grammar := sequences[b].grammar) is not None:
                limit = min(self._drafter.num_levels, sequences[b].num_left - 1)
                kept[b] = grammar.keep(proposed[b], limit)
        if kept == proposed:
            return trees
        made = DraftTrees.pad(kept, self._target.device)
        if self._target.is_recurrent:  # forced text may be spelled in other tokens beside a draft
            made = made.chains()
        return prune(made, 1 + self._memory.num_drafts)

    def observe(
        self,
        sequences: list[RunningSequence],
        lengths: list[int],
        trees: DraftTrees,
        accepted: list[int],
        verify_s: float,
    ) -> None:
        """Record a verification, as `Adaptive.observe` does."""
        if self._adaptive is not None:
            seconds = verify_s if self._timed_for else None
            self._adaptive.observe(sequences, lengths, trees, accepted, seconds)

    def read_first(self, sequence: RunningSequence, token_id: int, end: PromptEnd) -> None:
        """Let the draft read the first token after a prompt."""
        if sequence.drafts and not sequence.has_ended:
            self._timed_for = self._adaptive  # the host has waited for the token
            self._retrieve([(sequence, end.queries)])
            self._drafter.read(sequence.slot, [token_id])
            self._read_late(sequence, [token_id], end.features)

    def read(self, sequences: list[RunningSequence], step: Verified) -> None:
        """Retrieve where due. Then let active drafts read the decided tokens."""
        going = {
            b: sequence
            for b, sequence in enumerate(sequences)
            if sequence.drafts and not sequence.has_ended and step.new_token_ids[b]
        }
        for b, sequence in going.items():
            self._drafter.read(sequence.slot, step.new_token_ids[b])
        drafting = {}
        if not self.payoff.is_plain:
            if self._adaptive is not None and going:
                self._adaptive.decide([*going.values()])
            drafting = {b: sequence for b, sequence in going.items() if sequence.speculation.active}
        lengths = [sequence.length for sequence in drafting.values()]
        interval = self._adaptive.refresh_every(lengths) if self._adaptive else REFRESH_EVERY
        due = [
            (sequence, step.last_queries(b))
            for b, sequence in drafting.items()
            if sequence.policy.is_due(sequence.length, interval)
        ]
        if due:
            self._retrieve(due)
        prompt = [b for b, sequence in drafting.items() if not sequence.undrafted]
        if prompt:
            seconds = self._absorb(
                [sequences[b] for b in prompt], step.decided(prompt, whole=self._graphs.enabled)
            )
            if self._timed_for is not None:
                self._timed_for.costs.observe_draft("absorb", len(prompt), seconds)
        for b, sequence in going.items():
            if b not in prompt:
                new = step.new_token_ids[b]
                self._read_late(sequence, new, step.features[b, : len(new)].clone())

    def _read_late(self, sequence: RunningSequence, token_ids: list[int], features: Tensor) -> None:
        """Keep decided tokens and the features before them. An active draft reads all of them."""
        sequence.undrafted.append((token_ids, features))
        if sequence.speculation.active and not self.payoff.is_plain:
            # one by one: in a batch the others would be padded to the longest
            missed, before = sequence.catch_up()
            self._absorb([sequence], Decided.pad([missed], [before]))

    def _retrieve(self, due: list[tuple[RunningSequence, list[Tensor]]]) -> None:
        """Choose the chunks for drafts by queries [H, D] of each sequence's last committed token.

        The queries are of the scoring layers. The host waits once for the scores of all.
        """
        self._watch.charge("other_s", [sequence for sequence, _ in due])
        masses = [self._mass(*each) for each in due]
        on_host = torch.cat(masses).cpu().split([*map(len, masses)])
        for (sequence, _), mass in zip(due, on_host, strict=True):
            self._drafter.select(
                sequence.slot, sequence.policy.select(sequence.length, mass, sequence.stats)
            )
        self._watch.charge("retrieval_s", [sequence for sequence, _ in due])

    def _mass(self, sequence: RunningSequence, queries: list[Tensor]) -> Tensor:
        """Return each chunk's share [C] of attention; empty without scoring layers."""
        if not self._scored_layers:
            return torch.empty(0)
        rows = slice(sequence.region.start, sequence.region.start + sequence.length)
        keys = [self._target.cache.layers[layer][0, :, rows] for layer in self._scored_layers]
        return mean_mass(queries, keys, self._options.chunk_size, self._target.scale)

    def _absorb(self, sequences: list[RunningSequence], decided: Decided) -> float:
        """Let the draft read selected, then decided tokens; return the latter's seconds."""
        begin = self._watch.charge("other_s", sequences)
        if self._drafter.read_selected([sequence.slot for sequence in sequences]):
            self._wait_if_timed()
            now = self._watch.charge("draft_prefill_s", sequences)
            if self._timed_for is not None:
                self._timed_for.costs.observe_reading(len(sequences), now - begin)
            begin = now
        self._drafter.absorb([sequence.slot for sequence in sequences], decided)
        self._wait_if_timed()
        return self._watch.charge("draft_s", sequences) - begin
