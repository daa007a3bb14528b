"""The engine: SpecExtend, tree speculation or plain decoding of a stream of requests, a batch at a
time.

Shapes: `B` sequences, `N` tree nodes (root included), `T` tokens of a prefill chunk, `C` hidden
size, `F` features of a position (`Drafter.hidden_layers`), `V` vocabulary, `W` nodes of a path.
"""

import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
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
from specextend.decoding.prefill import PromptReader
from specextend.decoding.retrieval import REFRESH_EVERY, CachePolicy, mean_mass, scored_layers
from specextend.decoding.sampling import (
    NOT_FINITE,
    NonFiniteLogits,
    log_probs_of,
    penalties_of,
    where_finite,
)
from specextend.decoding.sequence import Sequence, StopChecker, Stopwatch, choose
from specextend.decoding.speculation import Adaptive, Payoff
from specextend.decoding.tree import Decided, Drafter, DraftTrees, among_roots, prune, roots_only
from specextend.decoding.verification import Verified, Verifier

OnError = Callable[[str, Exception], None]
TIMED_EVERY = 16
"""Captured steps of which one is timed, for which the host waits for the device after each
phase.
"""


class BatchError(RuntimeError):
    """A step of several sequences failed, because of one of them or of the machine; the engine is
    empty now.
    """

    def __init__(self, request_ids: list[str], error: Exception):
        super().__init__(f"{type(error).__name__}: {error}")
        self.request_ids = request_ids
        """The requests of the step."""


class Engine:
    """Decodes requests. Between two calls of `generate` it keeps nothing but weights and
    buffers.
    """

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
        """Take the models; without a `drafter` steps are plain. `max_tokens` limits prompt and
        output together. `asks` holds for requests that say nothing else.

        `adaptive` cuts trees and pauses speculation; without it all sequences speculate in every
        step, with whole trees. `graphs` are those of the drafter.
        """
        self.tokenizer = tokenizer
        self.num_steps = 0
        """Number of prefill chunks and decoding steps so far; it shows that the engine makes
        progress.
        """
        self.target = target
        self.drafter = drafter or Drafter()
        self.max_tokens = max_tokens
        self._eos_token_ids, self._asks = eos_token_ids, asks or Asks()
        self._cache_options = cache
        assert drafter is not None or adaptive is None, "without a draft there is nothing to adapt"
        self._adaptive, self._graphs = adaptive, graphs or Graphs()
        self._payoff = adaptive.payoff if adaptive else Payoff()
        self._admission = Admission(
            target.cache, self.drafter, tree.most_nodes, max_tokens, max_batch_size
        )
        traits = traits_of(target.device)
        self.decode_share = traits.decode_share
        """Share of the time that the running sequences have while a prompt is read, below 1."""
        self._memory = MemoryLadder(
            max_batch_size, tree.most_nodes if drafter else 0, traits.prefill_chunk
        )
        self._scored_layers = scored_layers(cache, target.layers) if drafter else ()
        self._num_levels = self.drafter.num_levels
        self._tree_attention = tree_attention
        self._verifier = Verifier(
            target,
            self.drafter.hidden_layers,
            self._scored_layers,
            self._num_levels,
            tree_attention,
            self._graphs,
        )
        self._choices = ChoiceScorer(tokenizer, target, self._count_step)
        self._grammars = Grammars(tokenizer, eos_token_ids, target.config.vocab_size)
        self._lock = threading.Lock()
        self._active: dict[str, Sequence] = {}
        self._reading: Sequence | None = None
        """The one of them whose prompt is being read; all others run."""
        self._owed_s = 0.0
        """Seconds of steps that the running sequences are owed before the next chunk of a
        prompt.
        """
        self._cancelled: set[str] = set()
        self._watch = Stopwatch()
        self._timed_for = adaptive
        self._reader = PromptReader(
            target, self.drafter, self._scored_layers, self._watch, self._count_step
        )

    def limits(self) -> dict[str, float] | None:
        """Return what its device can do (`measure_limits`) and what its target asks of it (a
        `ModelWork`), as one.

        None if the device has no memory left to measure its limits. No request may be running.
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
        """Return how many times as fast as plain decoding drafts made the documents of the last
        trial; None before its end, and for trees of one size.
        """
        return self._payoff.speedup

    @property
    def num_active(self) -> int:
        """Return the number of sequences in the engine."""
        return len(self._active)

    def cancel(self, request_id: str) -> None:
        """Drop a request between two steps; no completion follows. May be called from any
        thread.
        """
        with self._lock:
            self._cancelled.add(request_id)

    def progress(self) -> dict[str, int]:
        """Return the output tokens so far of requests whose prefill has begun. May be called from
        any thread.
        """
        with self._lock:
            return {
                name: sequence.stats.num_output_tokens for name, sequence in self._active.items()
            }

    def generate(
        self, source: Iterable[Request | None], on_error: OnError | None = None
    ) -> Iterator[Completion]:
        """Yield completions as they finish.

        `source` yields None if it has no request now. It is asked only while the batch has room,
        and may block only while nothing runs. If a request fails alone, `on_error(request_id,
        error)` is called; without `on_error` the error is raised. When memory runs out, requests
        start again with smaller sizes; if no size can be lowered, they fail.

        Raises:
            ValueError: a request can never fit, and there is no `on_error`.
            BatchError: a step of several sequences failed, and there is an `on_error`.
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
        """Read a chunk of a prompt, or take a step of all sequences that run, whichever has the
        turn.

        A chunk is followed by steps until these have had their share of the time. A sequence that
        is doubted takes one alone.
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
        """Choose the prompt that is read next, unless there is one, if the source has one and there
        is room.
        """
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

    def _start(self, request: Request) -> Sequence | None:
        """Give the request a slot and cache rows; return None if it has to wait for them."""
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
        is_wanted = self._payoff.drafts if request.drafts is None else request.drafts
        drafts = self._memory.num_nodes > 0 and is_wanted and not request.choices
        policy = CachePolicy(self._cache_options)
        penalties = penalties_of(request, self.target.device, self._asks)
        sequence = Sequence(request, *admitted, stopper, policy, now, drafts, penalties, grammar)
        if not drafts:
            sequence.speculation.active = False
        elif self._adaptive is not None:
            running = [each for each in self._active.values() if each.drafts]
            sequence.speculation = self._adaptive.begin(len(request.prompt_token_ids), running)
        with self._lock:
            self._active[request.request_id] = sequence
        return sequence

    def _guard(
        self, work: Work, sequences: list[Sequence], queue: Queue, on_error: OnError | None
    ) -> None:
        """Do the work; if memory runs out and a size can be lowered, let the sequences start
        again.
        """
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
        # Here the exception is released, and with it the tensors of the failed forward.
        for sequence in sequences:
            self._leave(sequence)
            queue.num_retries[sequence.request.request_id] = sequence.stats.num_memory_retries + 1
        queue.give_back([sequence.request for sequence in sequences])
        self._graphs.clear()
        if self._reading is None:
            self._reader.forget()
        release_cached(self.target.device)
        self._watch.restart()

    def _has_less(self, work: Work, sequences: list[Sequence], size: int) -> bool:
        """Return True if another start takes less memory: with a smaller size, or without a
        sequence's draft.
        """
        still_drafts = self._memory.num_nodes == 0 and any(
            sequence.drafts for sequence in sequences
        )
        return self._memory.lower(work, size, len(self._active)) or still_drafts

    def _fail(self, sequences: list[Sequence], error: Exception, on_error: OnError) -> None:
        """Report the failure of a sequence that ran alone; raise BatchError if several ran."""
        if len(sequences) > 1:
            raise BatchError(
                [sequence.request.request_id for sequence in sequences], error
            ) from error
        self._leave(sequences[0])
        self._memory.ended()
        # the next prompt takes no rows of one that may have failed over them
        if self._reading is None:
            self._reader.forget()
        on_error(sequences[0].request.request_id, error)

    def _leave(self, sequence: Sequence) -> None:
        with self._lock:
            del self._active[sequence.request.request_id]
        if sequence is self._reading:
            self._reading = None
        self._admission.release(sequence.slot, sequence.region)

    def _finished(self, on_error: OnError | None) -> list[Completion]:
        """Let the sequences leave that have ended; return the completions of those that are not
        broken.
        """
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
                self._count_document(sequence)
                done.append(sequence.completion())
        return done

    def _count_document(self, sequence: Sequence) -> None:
        """Let a document that is done decide whether drafts go on, also those that have begun."""
        if sequence.request.drafts is None and not sequence.request.choices:
            worth_s = sequence.speculation.worth_s
            self._payoff.ended(sequence.stats, worth_s, drafted=sequence.drafts)
        if not self._payoff.drafts:
            for each in self._active.values():
                each.drafts = each.speculation.active = False
                each.undrafted.clear()

    def _drop_cancelled(self, queue: Queue) -> None:
        with self._lock:
            dropped = [self._active[name] for name in self._cancelled if name in self._active]
            queue.drop(self._cancelled)
            self._cancelled.clear()
        for sequence in dropped:
            self._leave(sequence)

    def _prefill(self, sequences: list[Sequence]) -> None:
        """Run a chunk of the prompt through target and draft; after the last choose a token,
        retrieve for the draft.
        """
        [sequence] = sequences
        request = sequence.request
        end = self._reader.read(sequence, self._memory.chunk_size)
        if end is None:
            synchronise(self.target.device)  # a GPU's seconds are the chunk's, not the next step's
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
        if sequence.drafts and not sequence.has_ended:
            self._timed_for = self._adaptive  # the host has waited for the token
            self._retrieve([(sequence, end.queries)])
            self.drafter.read(sequence.slot, [token_id])
            self._read_late(sequence, [token_id], end.features)

    def _count_step(self) -> None:
        self.num_steps += 1

    def _step(self, running: list[Sequence]) -> None:
        """Draft, verify, accept, then let the draft look again, for all running sequences at
        once.
        """
        started_at = self._watch.mark
        is_timed = not self._graphs.enabled or self.num_steps % TIMED_EVERY == 0
        self._timed_for = self._adaptive if is_timed else None
        self._wait_if_timed()
        self._watch.charge("other_s", running)
        trees = self._draft(running)
        if self._graphs.enabled and trees.num_nodes > 1:  # n-grams and grammars leave any size
            costs = self._adaptive.costs if self._adaptive else None
            trees = trees.padded(
                costs.size_for(trees.num_nodes) if costs else 1 + self._memory.num_nodes
            )
        begin = self._watch.mark
        step = self._verifier.verify(running, trees)
        self._accept(running, trees, step, begin)
        self._count_step()
        self._look_again(running, step)
        for sequence in running:
            scores = bool(sequence.request.closed) and not self.target.is_recurrent
            if scores and sequence.has_ended and not sequence.is_broken:
                self._choices.score(sequence)
                self._watch.charge("verify_s", [sequence])
        self._payoff.took(self._watch.mark - started_at)

    def _wait_if_timed(self) -> None:
        """Wait for what was launched, if its time is to be known."""
        if self._timed_for is not None:
            synchronise(self.target.device)

    def _draft(self, sequences: list[Sequence]) -> DraftTrees:
        """Propose a tree for each sequence; for a plain step it is the root, and behind it what a
        grammar forces.
        """
        roots = [sequence.root_token_id for sequence in sequences]
        if sequences[0].is_doubted or self._payoff.is_plain:
            return roots_only(roots, self.target.device)
        places = [
            b
            for b, sequence in enumerate(sequences)
            if sequence.drafts and sequence.speculation.active
        ]
        trees = self._propose([sequences[b] for b in places]) if places else None
        pausing = [b for b, sequence in enumerate(sequences) if sequence.drafts and b not in places]
        if (glanced := self._glance([sequences[b] for b in pausing], sequences)) is not None:
            trees = (
                glanced
                if trees is None
                else DraftTrees.pad([*trees.nodes(), *glanced.nodes()], self.target.device)
            )
            places += pausing
        if trees is None:
            return self._constrained(
                roots_only(roots, self.target.device), sequences, drafting=False
            )
        proposing = [sequences[b] for b in places]
        if self._adaptive is not None:
            trees = self._adaptive.prune(
                trees, proposing, [sequence.length for sequence in sequences]
            )
        if places != [*range(len(sequences))]:
            trees = among_roots(trees, places, roots)
        self._watch.charge("draft_s", proposing)
        return self._constrained(trees, sequences, drafting=False) if pausing else trees

    def _propose(self, drafting: list[Sequence]) -> DraftTrees:
        """Propose a tree for each of the sequences that draft."""
        begin = self._watch.mark
        most_nodes = max(1, self._memory.num_nodes)
        if self._adaptive is not None:
            most_nodes = min(most_nodes, self._adaptive.most_nodes)
        trees = self.drafter.propose([sequence.slot for sequence in drafting], most_nodes)
        if self.target.is_recurrent:
            trees = trees.chains()
        trees = prune(self._constrained(trees, drafting, drafting=True), 1 + self._memory.num_nodes)
        self._wait_if_timed()
        now = self._watch.charge("draft_s", drafting)
        if self._timed_for is not None:
            self._timed_for.costs.observe_draft(
                "propose", len(drafting), now - begin, self._timed_for.width
            )
        return trees

    def _glance(self, pausing: list[Sequence], running: list[Sequence]) -> DraftTrees | None:
        """Propose what takes no time for sequences that pause; captured steps have no trees of
        other sizes.
        """
        if self._adaptive is None or not pausing or self._graphs.enabled:
            return None
        least = self._adaptive.least_probability([sequence.length for sequence in running])
        trees = self.drafter.glance(
            [sequence.slot for sequence in pausing], self._memory.num_nodes, least
        )
        return trees.chains() if trees and self.target.is_recurrent else trees

    def _constrained(
        self, trees: DraftTrees, sequences: list[Sequence], *, drafting: bool
    ) -> DraftTrees:
        """Take out of trees what grammars forbid, and add what they force: of those that draft, or
        of those that pause.

        A pause does not hold up what is forced.
        """
        asked = [each.drafts and each.speculation.active == drafting for each in sequences]
        grammars = [
            each.grammar if is_asked else None
            for each, is_asked in zip(sequences, asked, strict=True)
        ]
        if not any(grammars):
            return trees
        limits = [min(self._num_levels, each.num_left - 1) for each in sequences]
        proposed = trees.nodes()
        rows = zip(grammars, proposed, limits, strict=True)
        kept = [
            nodes if grammar is None else grammar.keep(nodes, limit)
            for grammar, nodes, limit in rows
        ]
        if kept == proposed:
            return trees
        made = DraftTrees.pad(kept, self.target.device)
        if self.target.is_recurrent:  # what is forced may be spelled in other tokens beside it
            made = made.chains()
        return prune(made, 1 + self._memory.num_nodes)

    def _accept(
        self, sequences: list[Sequence], trees: DraftTrees, step: Verified, begin: float
    ) -> None:
        """Append each sequence's decided tokens, and count the step, whose verification started at
        `begin`.
        """
        lengths = [sequence.length for sequence in sequences]
        decided = [*zip(step.new_token_ids, step.is_finite, strict=True)]
        accepted = [len(new) - is_finite for new, is_finite in decided]
        for sequence, size, number, (new, _) in zip(
            sequences, trees.sizes, accepted, decided, strict=True
        ):
            sequence.length += len(new)
            if size > 1 and sequence.speculation.active:
                sequence.count_first(new, number, self.drafter.drafted)
            sizes = size - 1, number, self._num_levels
            sequence.count_step(
                *sizes, batch_size=len(sequences), hybrid=self._tree_attention == "hybrid"
            )
        now = self._watch.charge("verify_s", sequences)
        if self._adaptive is not None:
            self._adaptive.observe(
                sequences, lengths, trees, accepted, now - begin if self._timed_for else None
            )
        for sequence, (new, is_finite) in zip(sequences, decided, strict=True):
            if new:
                sequence.push(new, now)
            sequence.is_doubted = not is_finite
            sequence.is_broken = not (is_finite or sequence.has_ended) and trees.num_nodes == 1

    def _look_again(self, sequences: list[Sequence], step: Verified) -> None:
        """Retrieve where it is due, then let the draft read what was decided, unless it pauses in
        the next step.
        """
        going = {
            b: sequence
            for b, sequence in enumerate(sequences)
            if sequence.drafts and not sequence.has_ended and step.new_token_ids[b]
        }
        for b, sequence in going.items():
            self.drafter.read(sequence.slot, step.new_token_ids[b])
        drafting = {}
        if not self._payoff.is_plain:
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

    def _read_late(self, sequence: Sequence, token_ids: list[int], features: Tensor) -> None:
        """Keep decided tokens for the draft, and the features before them; let it read all it
        missed if it drafts.
        """
        sequence.undrafted.append((token_ids, features))
        if sequence.speculation.active and not self._payoff.is_plain:
            # alone, because others would be padded to it
            missed, before = sequence.catch_up()
            self._absorb([sequence], Decided.pad([missed], [before]))

    def _retrieve(self, due: list[tuple[Sequence, list[Tensor]]]) -> None:
        """Choose what the draft sees of sequences, by the queries [H, D] of each one's last
        committed token.

        They are those of the layers that score. The host waits once for the scores of all.
        """
        self._watch.charge("other_s", [sequence for sequence, _ in due])
        masses = [self._mass(*each) for each in due]
        on_host = torch.cat(masses).cpu().split([*map(len, masses)])
        for (sequence, _), mass in zip(due, on_host, strict=True):
            self.drafter.select(
                sequence.slot, sequence.policy.select(sequence.length, mass, sequence.stats)
            )
        self._watch.charge("retrieval_s", [sequence for sequence, _ in due])

    def _mass(self, sequence: Sequence, queries: list[Tensor]) -> Tensor:
        """Return each chunk's share [C] of the attention of some queries; nothing if no layer
        scores.
        """
        if not self._scored_layers:
            return torch.empty(0)
        rows = slice(sequence.region.start, sequence.region.start + sequence.length)
        keys = [self.target.cache.layers[layer][0, :, rows] for layer in self._scored_layers]
        return mean_mass(queries, keys, self._cache_options.chunk_size, self.target.scale)

    def _absorb(self, sequences: list[Sequence], decided: Decided) -> float:
        """Let the draft read what was selected and what was decided; return the seconds of the
        latter.
        """
        begin = self._watch.charge("other_s", sequences)
        if self.drafter.read_selected([sequence.slot for sequence in sequences]):
            self._wait_if_timed()
            now = self._watch.charge("draft_prefill_s", sequences)
            if self._timed_for is not None:
                self._timed_for.costs.observe_reading(len(sequences), now - begin)
            begin = now
        self.drafter.absorb([sequence.slot for sequence in sequences], decided)
        self._wait_if_timed()
        return self._watch.charge("draft_s", sequences) - begin
