"""Documents of a retrieval study: real documents of given lengths, and probes made of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specextend.bench.probes import PROBE_KINDS, ProbeKind, ProbeMaker
from specextend.bench.workload import BenchDocument
from specextend.config import RunConfig
from specextend.data.inputs import DocumentError, InputOptions
from specextend.data.prompts import Prompts
from specextend.data.source import open_source

CORPORA = ("govreport", "pg19")
"""Kinds of real documents: `<kind>.parquet` of the folder of examples."""
KINDS: tuple[str, ...] = (*CORPORA, *PROBE_KINDS)
_LEAST, _MOST = 0.75, 4 / 3  # shares of a length: shorter documents belong to another length, longer ones lose too much
_PROBE_TEXT_TOKENS = 4096  # longer texts may be what a draft was trained on


@dataclass(frozen=True, slots=True)
class StudyDocument:
    """A prompt, and its answer if it is known."""

    document: BenchDocument
    kind: str
    answer_token_ids: list[int] | None = None
    """The known answer; None: the target's own greedy output counts."""
    sources: list[int | None] | None = None
    """For each answer token, its source, as in `Probe.sources`."""
    num_dropped_tokens: int = 0
    """Tokens cut from a document that was too long."""


@dataclass(frozen=True, slots=True)
class _Text:
    doc_id: str
    text: str
    num_prompt_tokens: int


class StudyDocuments:
    """Chooses documents of any kind and length; reads each corpus once."""

    def __init__(self, config: RunConfig, folder: str, tokenizer: Any, max_tokens: int, seed: int) -> None:
        """Take the folder of the corpora; `max_tokens` limits prompt and output of one request together."""
        self._config, self._folder, self._tokenizer, self._seed = config, folder, tokenizer, seed
        self._max_tokens = max_tokens
        self._whole = Prompts(tokenizer, replace(config.prompt, max_prompt_tokens=None), 1 << 30)
        self._texts: dict[str, list[_Text]] = {}
        self._maker: ProbeMaker | None = None

    def choose(self, kind: str, length: int, count: int, max_new_tokens: int) -> list[StudyDocument]:
        """Choose `count` documents of `kind` with at most `length` prompt tokens, or fewer if the corpus has no more.

        Raises ValueError if a corpus cannot be read or is too short for probes.
        """
        if kind in CORPORA:
            return self._real(kind, length, max_new_tokens)[:count]
        [probe_kind] = [each for each in PROBE_KINDS if each == kind]
        return [self._probe(probe_kind, length, number) for number in range(count)]

    def _probe(self, kind: ProbeKind, length: int, number: int) -> StudyDocument:
        if self._maker is None:
            texts = [each for corpus in CORPORA for each in self._read(corpus)]
            short = [each.text for each in texts if each.num_prompt_tokens <= _PROBE_TEXT_TOKENS]
            self._maker = ProbeMaker(self._tokenizer, self._config.prompt.system, short, self._seed)
        probe = self._maker.make(kind, length, number)
        document = BenchDocument(probe.doc_id, length, probe.prompt_token_ids)
        return StudyDocument(document, kind, probe.answer_token_ids, probe.sources)

    def _real(self, kind: str, length: int, max_new_tokens: int) -> list[StudyDocument]:
        """List whole documents, the longest first, then those that lose least when cut."""
        prompts = Prompts(self._tokenizer, replace(self._config.prompt, max_prompt_tokens=length), self._max_tokens)
        near = [each for each in self._read(kind) if _LEAST * length < each.num_prompt_tokens <= _MOST * length]
        near.sort(key=lambda each: abs(length - each.num_prompt_tokens) + (each.num_prompt_tokens > length) * length)
        return [*_rendered(prompts, near, kind, length, max_new_tokens)]

    def _read(self, corpus: str) -> list[_Text]:
        if corpus not in self._texts:
            path = f"{self._folder.rstrip('/')}/{corpus}.parquet"
            source = open_source(InputOptions(path=path, id_column="doc_id"))
            documents = [source.read(row.key).document for row in source.scan() if row.error_class is None]
            self._texts[corpus] = [
                _Text(each.doc_id, each.text, len(self._whole.render(each.text, 0).token_ids)) for each in documents
            ]
        return self._texts[corpus]


def _rendered(
    prompts: Prompts, texts: Sequence[_Text], kind: str, length: int, max_new_tokens: int
) -> Iterator[StudyDocument]:
    for each in texts:
        try:
            prompt = prompts.render(each.text, max_new_tokens)
        except DocumentError:
            continue  # too long under `length_policy: error`, which takes whole documents only
        document = BenchDocument(each.doc_id, length, prompt.token_ids)
        yield StudyDocument(document, kind, num_dropped_tokens=prompt.num_dropped_tokens)
