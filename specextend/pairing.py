"""Whether a draft fits its target, and what the pair is, by their files alone."""

from __future__ import annotations

from pathlib import Path

from specextend.checkpoint import hash_files
from specextend.drafters.eagle_config import load_eagle_config
from specextend.drafters.formats import is_ours, read_head, read_vocabulary, weight_files
from specextend.drafters.options import DraftOptions
from specextend.drafters.reduced import ReducedVocabulary, read_reduced
from specextend.models import (
    ModelError,
    ModelFacts,
    TargetOptions,
    check_model,
    load_tokenizer,
    model_folder,
    rope_frequencies,
    tokens_sha256,
    weight_hashes,
)

_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id")


def check_pair(target: TargetOptions, draft: DraftOptions | None) -> ModelFacts:
    """The target's facts, once it is known that both models can be served and speak the same tokens.

    Reads configs, tokenizers and the headers of weight files, never the weights. Raises ModelError in one line.
    """
    facts = check_model(target.model, target.revision)
    if draft is None or draft.kind == "ngram":
        return facts
    if draft.kind == "eagle":
        _check_eagle(facts, target, draft.model)
    else:
        _check_model(facts, target, draft)
    return facts


def pair_hashes(target: TargetOptions, draft: DraftOptions | None) -> dict[str, str]:
    """SHA-256 of `target`, `tokenizer` and `draft`: what the files hold, not where they lie."""
    hashes = weight_hashes(target.model, target.revision)
    named = {"target": hashes["weights"], "tokenizer": hashes["tokenizer"]}
    if draft is None or draft.kind == "ngram":
        return named
    if draft.kind == "eagle":
        folder = Path(draft.model)
        return named | {"draft": hash_files([folder / "config.json", *weight_files(folder)])}
    return named | {"draft": weight_hashes(draft.model, draft.revision)["weights"]}


def reduced_vocabulary(draft: DraftOptions) -> ReducedVocabulary | None:
    """The reduced vocabulary of a draft of kind `model`; None where it has none. Raises ModelError in one line."""
    folder = model_folder(draft.model, draft.revision)
    try:
        return None if folder is None else read_reduced(folder)
    except ValueError as error:
        raise ModelError(str(error)) from None


def _check_eagle(target: ModelFacts, target_options: TargetOptions, folder: str) -> None:
    tokens = None
    try:
        if is_ours(folder):
            config = load_eagle_config(folder)
            hidden_size, vocab_size, tokens = config.hidden_size, config.vocab_size, config.tokens_sha256
        else:
            hidden_size, vocab_size = _check_published(target, folder)
    except ValueError as error:
        raise ModelError(str(error)) from None
    _check_equal("hidden_size", folder, hidden_size, target.name, target.hidden_size)
    _check_equal("vocab_size", folder, vocab_size, target.name, target.vocab_size)
    _check_same_tokens(folder, tokens, target, target_options)


def _check_published(target: ModelFacts, folder: str) -> tuple[int, int]:
    """The target's hidden size and vocabulary that a published head was made for, its own parts checked."""
    head = read_head(folder)
    rope_frequencies(head.rope, head.head_dim, folder)
    read_vocabulary(head)
    try:
        head.hidden_layers(target.num_layers)
    except ValueError as error:
        raise ModelError(f"draft {folder} does not fit target {target.name}: {error}") from None
    return head.target_hidden_size, head.vocab_size


def _check_model(target: ModelFacts, target_options: TargetOptions, draft: DraftOptions) -> None:
    facts = check_model(draft.model, draft.revision)
    if (reduced := reduced_vocabulary(draft)) is not None:  # such a draft has no tokenizer of its own
        _check_equal("target_vocab_size", draft.model, reduced.target_vocab_size, target.name, target.vocab_size)
        _check_same_tokens(draft.model, reduced.tokens_sha256, target, target_options)
        return
    _check_equal("vocab_size", draft.model, facts.vocab_size, target.name, target.vocab_size)
    ours = load_tokenizer(target_options.model, target_options.revision)
    theirs = load_tokenizer(draft.model, draft.revision)
    for name in _SPECIAL_TOKENS:
        _check_equal(name, draft.model, getattr(theirs, name), target.name, getattr(ours, name))
    _check_tokens(draft.model, theirs.get_vocab(), target, ours.get_vocab())


def _check_tokens(draft: str, theirs: dict[str, int], target: ModelFacts, ours: dict[str, int]) -> None:
    """The same id must be the same token in both, up to the last that a model can choose."""
    by_id = [{token_id: token for token, token_id in vocabulary.items()} for vocabulary in (theirs, ours)]
    for token_id in range(target.vocab_size):
        _check_equal(f"token {token_id}", draft, by_id[0].get(token_id), target.name, by_id[1].get(token_id))


def _check_same_tokens(draft: str, tokens: str | None, target: ModelFacts, options: TargetOptions) -> None:
    """Where a draft without a tokenizer says whose tokens it speaks, they must be the target's."""
    if tokens is not None and tokens != tokens_sha256(load_tokenizer(options.model, options.revision)):
        raise ModelError(f"draft {draft} does not fit target {target.name}: it was trained for another tokenizer")


def _check_equal(what: str, draft: str, theirs: object, target: str, ours: object) -> None:
    if theirs != ours:
        raise ModelError(f"draft {draft} does not fit target {target}: {what} is {theirs!r} and {ours!r}")
