"""The side `llama.cpp`: its server in a process of its own, on a GGUF file with the target's weights, timed by itself.

Prompts and outputs are token ids, so the vocabulary in the file is made up: `t0`, `t1` and so on. With a real one,
llama.cpp would also end outputs at tokens that only look like an end to it.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from contextlib import closing
from http.client import HTTPConnection
from importlib import metadata
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import urlsplit

import gguf
import torch
from torch import Tensor

from specextend.bench import llama_server
from specextend.bench.measurement import Measurement
from specextend.config import RunConfig
from specextend.models import load_causal_lm, read_facts, resolve_device

WHEEL = "xllamacpp"
_MOST_EOS = 3  # a GGUF file has keys for that many
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TYPES = {
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.float32: gguf.GGMLQuantizationType.F32,
}
_GREEDY = {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}


def find_obstacle(config: RunConfig) -> str | None:
    """Say in one sentence why llama.cpp cannot run the configuration's target; None if it can."""
    target = config.target
    if importlib.util.find_spec(WHEEL) is None:
        return f"llama.cpp needs the package {WHEEL}: pip install 'specextend[bench]'"
    if resolve_device(target.device).type != "cpu":
        return f"llama.cpp is measured on the CPU only, and target.device is {target.device!r}"
    num_eos = len(read_facts(target.model, target.revision).eos_token_ids)
    if not 1 <= num_eos <= _MOST_EOS:
        return f"llama.cpp needs one to {_MOST_EOS} EOS tokens, and {target.model} has {num_eos}"
    return None


def describe_llama_cpp(config: RunConfig) -> dict[str, Any]:
    """Describe the build and its settings as JSON values. Raises ValueError if the side cannot run."""
    _refuse(config)
    import xllamacpp

    return {
        WHEEL: metadata.version(WHEEL),
        "system_info": xllamacpp.get_system_info().strip(" |\n"),
        "cache": _cache_type(config),
        "flash_attention": "auto",
    }


def load_llama_cpp(config: RunConfig) -> LlamaCppSide:
    """Write the target as a GGUF file, and load that. Raises ValueError if the side cannot run."""
    _refuse(config)
    target = config.target
    facts = read_facts(target.model, target.revision)
    with TemporaryDirectory(prefix="specextend-gguf-") as folder:
        path = Path(folder, "target.gguf")
        model = load_causal_lm(target.model, target.revision, target.dtype, target.device, "sdpa")
        write_gguf(model, facts.eos_token_ids, path)
        del model  # before llama.cpp allocates its own
        return LlamaCppSide(path, config.max_tokens(facts.context_length), _cache_type(config))


def _refuse(config: RunConfig) -> None:
    if (obstacle := find_obstacle(config)) is not None:
        raise ValueError(obstacle)


def _cache_type(config: RunConfig) -> str:
    """Choose the cache's number format: llama.cpp's default of two bytes, but four for a target of four."""
    return "F32" if config.target.dtype == "float32" else "F16"


class LlamaCppSide:
    """llama.cpp's server (`llama_server.py`), with as many threads as torch has; it ends with this object."""

    def __init__(self, path: Path, num_tokens: int, cache_type: str) -> None:
        """Load a GGUF file with room for `num_tokens` tokens; the file may be removed afterwards.

        Raises ValueError if llama.cpp refuses the file.
        """
        options = {"path": str(path), "num_tokens": num_tokens, "cache": cache_type, "threads": torch.get_num_threads()}
        command = [sys.executable, "-m", llama_server.__name__, json.dumps(options)]
        server = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        assert server.stdout is not None
        self._address = urlsplit(server.stdout.readline().strip()).netloc
        self._end = weakref.finalize(self, _end, server)
        if not self._address:
            self._end()
            raise ValueError("llama.cpp cannot load this target; leave llama.cpp out of --sides")

    def run(self, prompt_token_ids: list[int], max_new_tokens: int) -> Measurement:
        """Decode and measure by llama.cpp's own clock.

        Its `predicted_ms` begin when the first token is chosen, so they are the seconds of the tokens after the first;
        `prompt_ms` end there.
        """
        answer = self._ask({**_GREEDY, "prompt": prompt_token_ids, "n_predict": max_new_tokens})
        token_ids, timings = answer["tokens"], answer["timings"]
        assert timings["prompt_n"] == len(prompt_token_ids), "the whole prompt is read each time"
        assert timings["predicted_n"] == len(token_ids)
        decode_s = timings["predicted_ms"] / 1e3
        total_s = timings["prompt_ms"] / 1e3 + decode_s
        return Measurement(token_ids, decode_s, total_s, num_steps=len(token_ids) - 1)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with closing(HTTPConnection(self._address)) as connection:
            connection.request("POST", "/completion", json.dumps(request), {"Content-Type": "application/json"})
            answer: dict[str, Any] = json.load(connection.getresponse())
        if "error" in answer:
            raise ValueError(f"llama.cpp refused a document: {answer['error']['message']}")
        return answer


def _end(server: subprocess.Popen[str]) -> None:
    """End a server by closing its standard input."""
    server.communicate()


def write_gguf(model: Any, eos_token_ids: Sequence[int], path: Path) -> None:
    """Write a transformers causal LM as a GGUF file: matrices in its dtype, vectors in float32.

    Raises ValueError if the file cannot say what the model needs.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config.model_type])
    _add_shape(writer, config)
    _add_rope(writer, config.rope_parameters, config.max_position_embeddings)
    _add_vocabulary(writer, config.vocab_size, eos_token_ids)
    for name, tensor in _tensors(model):
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=_TYPES[tensor.dtype])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    head_dim = _head_dim(config)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)


def _add_rope(writer: gguf.GGUFWriter, rope: dict[str, Any], num_positions: int) -> None:
    """Write the RoPE's keys; those of `llama3` are in a tensor. Raises ValueError for an option that has no key."""
    kind = rope["rope_type"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind not in ("linear", "yarn"):
        return
    others = {key for key, value in rope.items() if value is not None} - {
        *("rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    }
    if others:
        raise ValueError(f"llama.cpp is not measured with the RoPE option {min(others)}; leave it out of --sides")
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings") or num_positions)


def _add_vocabulary(writer: gguf.GGUFWriter, size: int, eos_token_ids: Sequence[int]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token_id}" for token_id in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])  # a vocabulary of this kind must have one
    keys = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token_id in zip(keys, eos_token_ids, strict=False):
        add(token_id)


def _tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights under GGUF's names."""
    config = model.config
    architecture = _ARCHITECTURES[config.model_type]
    [number] = [number for number, name in gguf.MODEL_ARCH_NAMES.items() if name == architecture]
    names = gguf.get_tensor_name_map(number, config.num_hidden_layers)
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for theirs, tensor in model.state_dict().items():
        if theirs == "lm_head.weight" and config.tie_word_embeddings:
            continue
        name = names.get_name(theirs, (".weight", ".bias"))
        assert name is not None, theirs
        num_heads = heads.get(theirs.split(".")[-2])
        yield name, _interleaved(tensor, num_heads) if num_heads and architecture == "llama" else tensor
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", _frequency_factors(model)


def _interleaved(tensor: Tensor, num_heads: int) -> Tensor:
    """Interleave the two halves of each head: GGUF's `llama` has the rows that RoPE turns together side by side."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(model: Any) -> Tensor:
    """Compute by how much `llama3` divides each frequency of plain RoPE: [head_dim / 2]."""
    inv_freq = model.model.rotary_emb.inv_freq.float()
    exponents = torch.arange(len(inv_freq)) / len(inv_freq)
    return model.config.rope_parameters["rope_theta"] ** -exponents / inv_freq


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
