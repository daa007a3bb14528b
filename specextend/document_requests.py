"""From a row of the input to a request for the engine, and from the engine's errors to the document's."""

from __future__ import annotations

from hashlib import blake2b

from specextend.config import RunConfig
from specextend.core import Request, SamplingParams, first_line
from specextend.data.inputs import DocumentError, Row
from specextend.data.prompts import Prompt
from specextend.decoding.device import is_out_of_memory

OUT_OF_MEMORY = "OutOfMemoryError"
"""Error class of a document that does not fit into memory, whichever allocator says so."""


def document_seed(run_seed: int, doc_id: str) -> int:
    """Derive a document's own seed: the same on every worker, in every order, after every restart."""
    return int.from_bytes(blake2b(f"{run_seed}:{doc_id}".encode(), digest_size=8).digest()) >> 1


def max_new_tokens_of(config: RunConfig, row: Row) -> int:
    """Return the limit of a document's output: its own, or the run's."""
    return config.decoding.max_new_tokens if row.max_new_tokens is None else row.max_new_tokens


def document_request(config: RunConfig, row: Row, prompt: Prompt, request_id: str) -> Request:
    """Make a request of a document, with the options of the run and the document's seed."""
    decoding = config.decoding
    sampling = SamplingParams(
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        seed=document_seed(decoding.seed, row.document.doc_id),
        stop=decoding.stop,
        stop_repetition=decoding.stop_repetition,
        repetition_penalty=decoding.repetition_penalty,
        no_repeat_ngram_size=decoding.no_repeat_ngram_size,
    )
    return Request(
        request_id=request_id,
        prompt_token_ids=prompt.token_ids,
        max_new_tokens=max_new_tokens_of(config, row),
        sampling=sampling,
    )


def as_document_error(error: Exception) -> DocumentError:
    """Return what becomes of a document that failed alone in the engine."""
    if isinstance(error, DocumentError):
        return error
    if is_out_of_memory(error):
        message = f"even alone and without a draft: {first_line(error)}"
        return DocumentError(OUT_OF_MEMORY, message, "decode", retryable=True)
    return DocumentError(type(error).__name__, first_line(error), "decode")
