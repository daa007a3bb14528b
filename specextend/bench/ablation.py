"""`ablation`: the parts of SpecExtend, added one by one. `reasoning`: some of them where outputs are long.

Each step changes the configuration of the step before it; the last one is the configuration as it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specextend.bench.series import PromptSet, Series, SeriesOptions, Variant, document_prompts, measure_series
from specextend.bench.sides import in_mode
from specextend.bench.workload import BenchDocument, Say, bench_documents, make_prompts
from specextend.config import RunConfig
from specextend.core import SamplingParams
from specextend.data.source import open_source
from specextend.models import resolve_device

PLAIN = "autoregressive"
ABLATION = SeriesOptions(buckets=(2048, 4096), per_bucket=4, max_new_tokens=96)
ABLATION_QUICK = SeriesOptions(buckets=(2048,), per_bucket=2, max_new_tokens=24)
REASONING = SeriesOptions(buckets=(4096,), per_bucket=3, max_new_tokens=2000)
REASONING_QUICK = SeriesOptions(buckets=(2048,), per_bucket=1, max_new_tokens=200)
REASONING_STEPS = (PLAIN, "+ streaming", "+ retrieval", "+ n-grams")
SHORT_PROMPT = 128
"""Tokens of the short prompts of `reasoning`."""
SHORT_OUTPUT = 128
"""Most tokens of the outputs for its long prompts."""


def ablation(config: RunConfig, options: SeriesOptions, path: str | None, say: Say) -> dict[str, Any]:
    """Measure every step on the same documents, and return the series as JSON values.

    Raises ValueError if the configuration names no draft network, or the input, a model or the file at `path` cannot
    be used.
    """
    configs = ablation_configs(config)
    documents = bench_documents(config, options)
    longest = max(len(each.prompt_token_ids) for each in documents) + options.max_new_tokens
    return measure_series(
        config,
        Series(
            kind="ablation",
            options=options,
            documents=documents,
            variants=ablation_variants(configs, resolve_device(config.target.device).type, longest),
            prompts=document_prompts(documents, options.max_new_tokens),
            base=PLAIN,
        ),
        path,
        say,
    )


def reasoning(config: RunConfig, options: SeriesOptions, path: str | None, say: Say) -> dict[str, Any]:
    """Measure short prompts with long outputs and long prompts with short ones, and return the series as JSON values.

    Outputs have `max_new_tokens` and SHORT_OUTPUT tokens, past any end-of-sequence token. They are sampled as the
    configuration says, because a small model that decodes greedily for so long repeats itself. Raises ValueError as
    `ablation`.
    """
    configs = ablation_configs(config)
    documents = bench_documents(config, options)
    short = _short_prompts(config, options, len(documents))
    decoding = config.decoding
    sampling = SamplingParams(
        temperature=decoding.temperature,
        top_k=decoding.top_k,
        top_p=decoding.top_p,
        seed=decoding.seed,
        ignore_eos=True,
    )
    long_prompts = document_prompts(documents, min(SHORT_OUTPUT, options.max_new_tokens))
    prompts = [*document_prompts(short, options.max_new_tokens), *long_prompts]
    longest = max(len(prompt_set.token_ids[0]) + prompt_set.max_new_tokens for prompt_set in prompts)
    chosen = {name: configs[name] for name in REASONING_STEPS}
    return measure_series(
        config,
        Series(
            kind="reasoning",
            options=options,
            documents=[*short, *documents],
            variants=ablation_variants(chosen, resolve_device(config.target.device).type, longest),
            prompts=[_named(prompt_set, sampling) for prompt_set in prompts],
            base=PLAIN,
            how=f"{_how(decoding.temperature)}, one document at a time, to a fixed length",
        ),
        path,
        say,
    )


def _how(temperature: float) -> str:
    return f"sampled at temperature {temperature:g}" if temperature else "greedy"


def _short_prompts(config: RunConfig, options: SeriesOptions, count: int) -> list[BenchDocument]:
    """Render the beginnings of `count` documents as prompts of SHORT_PROMPT tokens."""
    limits = replace(config.prompt, max_prompt_tokens=SHORT_PROMPT, length_policy="head")
    prompts = make_prompts(config.model_copy(update={"prompt": limits}))
    source = open_source(config.input)
    rows = [row.key for row in source.scan() if row.error_class is None][:count]
    texts = [source.read(key).document for key in rows]
    return [
        BenchDocument(f"{each.doc_id}-start", SHORT_PROMPT, prompts.render(each.text, options.max_new_tokens).token_ids)
        for each in texts
    ]


def _named(prompt_set: PromptSet, sampling: SamplingParams) -> PromptSet:
    return replace(prompt_set, group=f"{prompt_set.group} in, {prompt_set.max_new_tokens:,} out", sampling=sampling)


def ablation_configs(config: RunConfig) -> dict[str, RunConfig]:
    """Return the configuration of each step by name. Raises ValueError if there is no draft network to add parts to."""
    if config.draft is None or config.draft.kind == "ngram":
        raise ValueError("an ablation adds parts to a draft network; set draft.kind and draft.model")
    whole = in_mode(config, "specextend")
    tree = _changed(
        whole,
        draft={"ngram": False},
        tree={"nodes": config.tree.most_nodes},
        attention={"backend": "reference", "tree": "dense"},
        cache={"policy": "full"},
    )
    flash = _changed(tree, attention={"backend": config.attention.backend})
    hybrid = _changed(flash, attention={"tree": "hybrid"})
    streaming = _changed(hybrid, cache={"policy": "streaming"})
    retrieval = _changed(streaming, cache={"policy": "retrieval"})
    ngrams = _changed(retrieval, draft={"ngram": True})
    return {
        PLAIN: in_mode(config, "autoregressive"),
        "tree": tree,
        "+ flash": flash,
        "+ hybrid": hybrid,
        "+ streaming": streaming,
        "+ retrieval": retrieval,
        "+ n-grams": ngrams,
        "as configured": whole,
    }


def _changed(config: RunConfig, **sections: Mapping[str, Any]) -> RunConfig:
    values = config.model_dump(mode="json")
    return RunConfig.from_values(values | {name: values[name] | dict(own) for name, own in sections.items()})


def ablation_variants(configs: Mapping[str, RunConfig], device_type: str, longest: int) -> list[Variant]:
    """Describe each step by its changes; one that changes nothing on the device, or equals another, is not measured.

    longest: tokens of the longest prompt with its output.
    """
    variants: list[Variant] = []
    before: RunConfig | None = None
    for name, config in configs.items():
        changes = {} if before is None else differences(before, config)
        reason = _idle(changes, config, device_type, longest)
        if (same := next((each.name for each in variants if each.config == config), None)) is not None:
            reason = f"{same} has the same configuration"
        if reason is not None:
            variants.append(Variant(name, None, {"changes": changes, "changes_nothing": reason}))
            continue
        variants.append(Variant(name, config, {"changes": changes}))
        before = config
    return variants


def differences(before: RunConfig, after: RunConfig) -> dict[str, Sequence[Any]]:
    """List what differs between two configurations: key -> (value before, value after)."""
    old, new = before.model_dump(mode="json"), after.model_dump(mode="json")
    return {
        f"{section}.{key}": (old[section][key], value)
        for section, values in new.items()
        if isinstance(values, dict) and isinstance(old[section], dict)
        for key, value in values.items()
        if old[section][key] != value
    }


def _idle(changes: Mapping[str, Sequence[Any]], config: RunConfig, device_type: str, longest: int) -> str | None:
    """Say why changes have no effect here, or return None."""
    if changes == {"attention.backend": ("reference", "auto")} and device_type != "cpu":
        return "on this device auto is reference"
    visible = config.cache.top_k_chunks * config.cache.chunk_size
    if [*changes] == ["cache.policy"] and longest <= visible:
        return f"the draft sees {visible:,} tokens, and no document has more"
    return None
