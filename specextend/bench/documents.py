"""Which documents a benchmark runs on: the first of each length bucket."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from specextend.data.documents import DocumentError, Source
from specextend.data.prompts import Prompts
from specextend.report.buckets import bucket_of


@dataclass(frozen=True, slots=True)
class BenchDocument:
    """A rendered prompt and where it comes from."""

    doc_id: str
    bucket: int
    """Upper bound of its length in tokens."""
    prompt_token_ids: list[int]


def choose_documents(
    source: Source, prompts: Prompts, *, buckets: Sequence[int], per_bucket: int, max_new_tokens: int
) -> list[BenchDocument]:
    """The first `per_bucket` documents, in input order, of each length in `buckets` (upper bounds in tokens).

    A document's length is its whole prompt's; one that would have to be shortened is not taken. Raises ValueError
    for a bucket that is no power of two from 512 on, and where no document has one of the lengths.
    """
    for bucket in buckets:
        if bucket != bucket_of(bucket):
            raise ValueError(f"a bucket is a power of two, 512 or more, got {bucket}")
    chosen: list[BenchDocument] = []
    counts: Counter[int] = Counter()
    for document in _rendered(source, prompts, max_new_tokens):
        if document.bucket in buckets and counts[document.bucket] < per_bucket:
            counts[document.bucket] += 1
            chosen.append(document)
        if all(counts[bucket] == per_bucket for bucket in buckets):
            break
    if not chosen:
        raise ValueError(
            f"no document of {source.options.path} has a prompt in the buckets {', '.join(map(str, buckets))}"
        )
    return sorted(chosen, key=lambda document: document.bucket)


def _rendered(source: Source, prompts: Prompts, max_new_tokens: int) -> Iterable[BenchDocument]:
    for scanned in source.scan():
        if scanned.error_class is not None:
            continue
        document = source.read(scanned.key).document
        try:
            prompt = prompts.render(document.text, max_new_tokens)
        except DocumentError:
            continue  # too long under `length_policy: error`: an error row of a run, nothing to measure here
        if prompt.num_dropped_tokens == 0:
            yield BenchDocument(document.doc_id, bucket_of(len(prompt.token_ids)), prompt.token_ids)
