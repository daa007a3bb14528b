"""A whole training: samples, the target's recordings of them, the draft, and what it came to.

The output folder holds the draft; its subfolder `work` what is needed to go on after an interruption.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specextend.attention.hf import IMPLEMENTATION
from specextend.attention.hybrid import load_backend
from specextend.config import RunConfig
from specextend.data.documents import Source
from specextend.data.inputs import DocumentError
from specextend.data.prompts import Prompts
from specextend.decoding.model import CachedModel
from specextend.drafters.eagle_config import VOCABULARY, WEIGHTS_FILE, EagleConfig, load_eagle_config
from specextend.models import load_target, load_tokenizer, read_facts
from specextend.training.eagle import EagleHead, add_copy_heads, new_weights
from specextend.training.fit import Fit, FitOptions, Say
from specextend.training.language_model import (
    Window,
    distillation_loss,
    new_language_model,
    recorded_windows,
    row_of_token,
    save_language_model,
    text_loss,
    text_windows,
)
from specextend.training.lessons import agreement, eagle_loss, make_lesson
from specextend.training.options import TrainOptions
from specextend.training.recording import Recorder, Recording, rows_needed
from specextend.training.samples import Sample, SampleMaker
from specextend.training.vocabulary import frequent_tokens

HELD_OUT = 10
"""One recording in so many is not learned from."""
TEXT_BATCH = 2
"""Windows of a step on text."""


@dataclass(frozen=True, slots=True)
class Target:
    """The frozen parts of a target that a draft is trained against."""

    embedding: Tensor
    """[tokens, C]"""
    lm_head: Tensor
    """[tokens, C]"""
    final_norm: Tensor
    """[C]"""


def distil(config: RunConfig, source: Source, options: TrainOptions, output: Path, say: Say) -> dict[str, Any]:
    """Train a draft for the configuration's target on the source's text; returns what was measured of it.

    Run again with the same arguments after an interruption, it goes on. Raises ValueError where `output` holds another
    training, or where the text is too little.
    """
    work = output / "work"
    work.mkdir(parents=True, exist_ok=True)
    _check_same(work / "settings.json", config, source, options)
    torch.manual_seed(options.sample.seed)
    paths = _record(config, source, options, work, say)
    model: Any = load_target(config.target, IMPLEMENTATION)
    target = Target(
        model.get_input_embeddings().weight.detach(),
        model.get_output_embeddings().weight.detach(),
        model.model.norm.weight.detach(),
    )
    held = paths[HELD_OUT // 2 :: HELD_OUT] or paths[-1:]
    learned = [path for path in paths if path not in held]
    train = _train_eagle if options.kind == "eagle" else _train_language_model
    figures = train(config, source, options, target, learned, held, output, say)
    return {"recordings": len(learned), "held_out": len(held), **figures}


def _check_same(path: Path, config: RunConfig, source: Source, options: TrainOptions) -> None:
    """A folder belongs to one training."""
    settings = {
        "target": config.target.model,
        "prompt": asdict(config.prompt),
        "files": [[file.relative_path, file.num_rows] for file in source.files],
        "options": asdict(options),
    }
    text = json.dumps(settings, indent=1, sort_keys=True)
    if path.exists() and path.read_text() != text:
        raise ValueError(f"{path} is of a training with other settings; name another output, or delete it")
    path.write_text(text)


def _texts(source: Source) -> Iterator[str]:
    """Every text that can be read, in input order."""
    for scanned in source.scan():
        if scanned.error_class is None:
            yield source.read(scanned.key).document.text


def _record(config: RunConfig, source: Source, options: TrainOptions, work: Path, say: Say) -> list[Path]:
    """A recording a sample, those that are there already left as they are."""
    folder = work / "recordings"
    folder.mkdir(exist_ok=True)
    samples = list(_samples(config, source, options))
    paths = [folder / f"{number:05d}.safetensors" for number in range(len(samples))]
    missing = [(path, sample) for path, sample in zip(paths, samples, strict=True) if not path.exists()]
    if missing:
        facts = read_facts(config.target.model, config.target.revision)
        model = load_target(config.target, IMPLEMENTATION)
        longest = max(len(sample.prompt_token_ids) + max(map(len, sample.answers), default=0) for sample in samples)
        attend = load_backend(config.attention.backend, model.device)
        target = CachedModel(model, attend, rows_needed(longest, options.summary))
        recorder = Recorder(target, frozenset(facts.eos_token_ids), options.summary)
        for count, (path, sample) in enumerate(missing, start=1):
            recorder.record(sample).save(path)
            say(f"recording {count}/{len(missing)}: {len(sample.prompt_token_ids)} prompt tokens")
    return paths


def _samples(config: RunConfig, source: Source, options: TrainOptions) -> Iterator[Sample]:
    """`num_samples` of them, round and round over the documents that are long enough."""
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    context = read_facts(config.target.model, config.target.revision).context_length
    try:
        maker = SampleMaker(tokenizer, Prompts(tokenizer, config.prompt, context), options.sample)
        texts, number, made = list(_texts(source)), 0, 0
        while made < options.num_samples:
            sample = maker.make(texts[number % len(texts)], number) if texts else None
            number += 1
            if sample is not None:
                made += 1
                yield sample
            elif made == 0 and number >= len(texts):
                raise ValueError(f"no text has the {options.sample.min_tokens} tokens that a sample needs")
    except DocumentError as error:
        raise ValueError(f"the prompt does not fit the target: {error.message}") from None


def _vocabulary(config: RunConfig, source: Source, size: int) -> Tensor:
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    texts = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in _texts(source))
    return frequent_tokens(texts, tokenizer.all_special_ids, size)


def _train_eagle(
    config: RunConfig,
    source: Source,
    options: TrainOptions,
    target: Target,
    learned: list[Path],
    held: list[Path],
    output: Path,
    say: Say,
) -> dict[str, Any]:
    head_config, weights = _first_head(config, source, options, target)
    head = EagleHead(head_config, weights, target.embedding, target.lm_head)
    vocabulary = weights[VOCABULARY]
    lessons = [make_lesson(Recording.load(path), target.lm_head, vocabulary) for path in learned]
    Fit(head, lambda lesson: eagle_loss(head, lesson), options.fit, output / "work", "eagle").run(lessons, say)
    dtype = getattr(torch, head_config.dtype)
    tensors = {name: weight.to(dtype).contiguous() for name, weight in head.weights().items()}
    save_file({**tensors, VOCABULARY: vocabulary}, output / WEIGHTS_FILE)
    head_config.save(output)
    kinds = ["text", *(["quotes"] * options.sample.num_quotes), *(["facts"] if options.sample.num_facts else [])]
    kinds += ["summaries"] * options.summary.count
    examined = [make_lesson(Recording.load(path), target.lm_head, vocabulary) for path in held]
    return {"agreement": agreement(head, examined, kinds, target.lm_head)}


def _first_head(
    config: RunConfig, source: Source, options: TrainOptions, target: Target
) -> tuple[EagleConfig, dict[str, Tensor]]:
    """Shape and tensors that training begins with."""
    if options.start_from is not None:
        head_config = load_eagle_config(options.start_from)
        weights = load_file(f"{options.start_from}/{WEIGHTS_FILE}")
    else:
        vocabulary = _vocabulary(config, source, options.vocabulary)
        head_config = _new_config(config, len(vocabulary))
        weights = {**new_weights(head_config, target.final_norm, options.sample.seed), VOCABULARY: vocabulary}
    if options.copy_heads and head_config.copy_heads is None:
        head_config = replace(head_config, copy_heads=options.copy_heads)
        weights = add_copy_heads(weights, head_config, target.embedding, options.sample.seed)
    return head_config, weights


def _new_config(config: RunConfig, draft_vocab_size: int) -> EagleConfig:
    """One layer of the target's own shape."""
    model: Any = load_target(config.target, IMPLEMENTATION).config
    head_dim = getattr(model, "head_dim", None) or model.hidden_size // model.num_attention_heads
    return EagleConfig(
        target=Path(config.target.model).name,
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_heads=model.num_attention_heads,
        num_kv_heads=model.num_key_value_heads,
        head_dim=head_dim,
        intermediate_size=model.intermediate_size,
        rope_theta=float(model.rope_parameters["rope_theta"]),
        layer_norm_eps=float(model.rms_norm_eps),
        head_norm_eps=1e-6,
        dtype="bfloat16",
        draft_vocab_size=draft_vocab_size,
    )


def _train_language_model(
    config: RunConfig,
    source: Source,
    options: TrainOptions,
    target: Target,
    learned: list[Path],
    held: list[Path],
    output: Path,
    say: Say,
) -> dict[str, Any]:
    """First the text alone, then the target's choices."""
    tokenizer = load_tokenizer(config.target.model, config.target.revision)
    vocabulary = _vocabulary(config, source, options.vocabulary)
    rows = row_of_token(vocabulary, len(target.embedding))
    name = Path(config.target.model).name
    model = new_language_model(options.language_model, vocabulary, target.embedding, name)
    size, work = options.language_model.positions, output / "work"
    texts = (tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"] for text in _texts(source))
    windows = [window for text in texts for window in text_windows(text, rows, size)]
    batches = [windows[i : i + TEXT_BATCH] for i in range(0, len(windows), TEXT_BATCH)]
    if options.text_passes and batches:
        (work / "text").mkdir(exist_ok=True)
        reading = FitOptions(passes=options.text_passes, learning_rate=2e-3, seed=options.fit.seed)
        Fit(model, lambda batch: text_loss(model, batch), reading, work / "text", "text").run(batches, say)
    recordings = [Recording.load(path) for path in learned]
    lessons = [w for i, recording in enumerate(recordings) for w in recorded_windows(recording, rows, size, i)]
    lm_head = target.lm_head[vocabulary]
    Fit(model, lambda lesson: distillation_loss(model, lesson, lm_head), options.fit, work, "model").run(lessons, say)
    held_windows = [w for path in held for w in recorded_windows(Recording.load(path), rows, size, 0)]
    figures = _held_out(model, held_windows, lm_head)
    save_language_model(model, vocabulary, output)
    return figures


@torch.inference_mode()
def _held_out(model: Any, windows: list[Window], lm_head: Tensor) -> dict[str, Any]:
    losses = [float(distillation_loss(model, window, lm_head)) for window in windows]
    return {"held_out_loss": sum(losses) / len(losses)}
