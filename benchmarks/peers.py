"""Peers: other systems that decode greedily with the weights of a configuration's target.

A peer is a small class: it loads the target, and `generate` decodes and measures.
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from subprocess import DEVNULL, PIPE
from tempfile import TemporaryDirectory
from typing import Any, Protocol
from urllib.parse import urlsplit

import gguf
import torch
from torch import Tensor
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from specextend import RunConfig
from specextend.core import how_to_install
from specextend.decoding.device import multiplies_bf16
from specextend.folders import on_this_machine
from specextend.models.causal_lm import load_causal_lm
from specextend.models.pairing import check_pair

LOOKUP = {"prompt_lookup_num_tokens": 10, "max_matching_ngram_size": 3}
"""Options of prompt lookup: transformers' default of ten tokens, after matches of three.

On six reports, 5 or 10 tokens after matches of 2 or 3 all gave 1.51 to 1.57 tokens per step.
"""
OPENVINO_LOOKUP = {"num_assistant_tokens": 5, "max_ngram_size": 3}
NGRAMS = {"kind": "map_k", "options": {"size_n": 3, "size_m": 8}}
WHEEL = "xllamacpp"
_MOST_EOS = 3  # limit of GGUF files
_ARCHITECTURES = {"llama": "llama", "mistral": "llama", "qwen2": "qwen2", "qwen3": "qwen3"}
_TYPES = {
    torch.bfloat16: gguf.GGMLQuantizationType.BF16,
    torch.float16: gguf.GGMLQuantizationType.F16,
    torch.float32: gguf.GGMLQuantizationType.F32,
}
_GREEDY = {"samplers": ["top_k"], "top_k": 1, "cache_prompt": False, "return_tokens": True}


@dataclass(frozen=True, slots=True)
class Output:
    """A peer's result for a prompt."""

    token_ids: list[int]
    decode_s: float
    """Seconds from the first token to the last."""
    total_s: float
    """Seconds from the start to the last token."""
    num_steps: int
    """Forwards of the target after prefill."""
    num_first_tokens: int = 1
    """Tokens at the start of `decode_s`; above 1 if prefill also verifies a guess."""


class Peer(Protocol):
    """Another system with the same weights."""

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Output]:
        """Decode prompts greedily, as many at a time as supported, and measure."""


class Transformers:
    """`generate(do_sample=False)` of a stock model with sdpa attention and a dynamic cache."""

    def __init__(
        self, model: Any, eos_token_ids: Sequence[int], options: Mapping[str, int] | None = None
    ) -> None:
        self._model, self._eos_token_ids, self._options = model, [*eos_token_ids], options or {}

    @classmethod
    def load(cls, config: RunConfig, options: Mapping[str, int] | None = None) -> Transformers:
        """Load the configuration's target."""
        target = config.target
        model = load_causal_lm(target.model, target.dtype, config.job.device, target.adapter)
        return cls(model, check_pair(target, None).eos_token_ids, options)

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Output]:
        """Decode the prompts in sequence."""
        return [self.decode(prompt, max_new_tokens) for prompt in prompts]

    def decode(self, prompt_token_ids: list[int], max_new_tokens: int) -> Output:
        """Decode greedily and measure wall-clock time."""
        prompt = torch.tensor([prompt_token_ids], device=self._model.device)
        clock = TokenClock(prompt.device)
        config = GenerationConfig(
            do_sample=False,
            max_new_tokens=max_new_tokens,
            eos_token_id=self._eos_token_ids or None,
            pad_token_id=self._eos_token_ids[0] if self._eos_token_ids else 0,
            **self._options,
        )
        begin = clock.now()
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=config,
            stopping_criteria=StoppingCriteriaList([clock]),
        )
        end = clock.now()
        assert clock.first_token_at is not None, "generate makes one token at least"
        return Output(
            output[0, len(prompt_token_ids) :].tolist(),
            decode_s=end - clock.first_token_at,
            total_s=end - begin,
            num_steps=clock.num_passes - 1,
            num_first_tokens=clock.first_length - len(prompt_token_ids),
        )


class TokenClock(StoppingCriteria):
    """A stopping criterion that never stops, but records times and counts forwards.

    `generate` calls it after each forward, which adds a token, or with prompt lookup all accepted
    ones.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.first_token_at: float | None = None
        self.first_length = 0
        """Prompt and output tokens after the first forward."""
        self.num_passes = 0
        """Forwards, prefill included."""

    def now(self) -> float:
        """Return the time after the device has finished its work."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()

    def __call__(self, input_ids: Any, scores: Any, **_: Any) -> Any:
        """Count a forward."""
        if self.first_token_at is None:
            self.first_token_at = self.now()
            self.first_length = input_ids.shape[1]
        self.num_passes += 1
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


class LlamaCpp:
    """llama.cpp's server (`llama_server.py`), with as many threads as torch.

    It reads a GGUF file of the target with an artificial vocabulary (`t0`, `t1`, ...), because
    prompts and outputs are token ids. With the real vocabulary, llama.cpp would end outputs at more
    tokens.
    """

    def __init__(
        self, path: Path, num_tokens: int, cache_type: str, drafts: Mapping[str, Any] | None = None
    ) -> None:
        """Load a GGUF file, which may be removed afterwards. Raises ValueError if llama.cpp refuses
        it.
        """
        options = {
            "path": str(path),
            "num_tokens": num_tokens,
            "cache": cache_type,
            "drafts": drafts or {},
        }
        options["threads"] = torch.get_num_threads()
        command = [
            sys.executable,
            str(Path(__file__).with_name("llama_server.py")),
            json.dumps(options),
        ]
        server = subprocess.Popen(command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True)
        assert server.stdout is not None
        self._address = urlsplit(server.stdout.readline().strip()).netloc
        self._end = weakref.finalize(self, server.communicate)  # closes its standard input
        if not self._address:
            self._end()
            raise ValueError("llama.cpp cannot load this target; leave it out")

    @classmethod
    def load(cls, config: RunConfig, drafts: Mapping[str, Any] | None = None) -> LlamaCpp:
        """Convert and load the configuration's target. Raises ValueError if that is impossible."""
        target = config.target
        facts = check_pair(target, None)
        if importlib.util.find_spec(WHEEL) is None:
            raise ValueError(f"llama.cpp needs the package {WHEEL}: {how_to_install('bench')}")
        if config.job.gpus_per_worker:
            raise ValueError("llama.cpp is measured on the CPU only: set job.gpus_per_worker to 0")
        if not 1 <= len(facts.eos_token_ids) <= _MOST_EOS:
            raise ValueError(
                f"llama.cpp needs one to {_MOST_EOS} EOS tokens, and {target.model} has "
                f"{len(facts.eos_token_ids)}"
            )
        with TemporaryDirectory(prefix="specextend-gguf-") as folder:
            path = Path(folder, "target.gguf")
            model = load_causal_lm(target.model, target.dtype, "cpu", target.adapter)
            write_gguf(model, facts.eos_token_ids, path)
            del model  # before llama.cpp allocates memory
            # llama.cpp's default is a cache of two bytes a number; a float32 target gets four
            cache_type = "F32" if target.dtype == "float32" else "F16"
            return cls(path, config.max_tokens(facts.context_length), cache_type, drafts)

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Output]:
        """Decode the prompts in sequence."""
        return [self.decode(prompt, max_new_tokens) for prompt in prompts]

    def decode(self, prompt_token_ids: list[int], max_new_tokens: int) -> Output:
        """Decode and measure by llama.cpp's clock.

        `predicted_ms` begin with the first token, where `prompt_ms` end.
        """
        answer = self._ask({**_GREEDY, "prompt": prompt_token_ids, "n_predict": max_new_tokens})
        token_ids, timings = answer["tokens"], answer["timings"]
        assert timings["prompt_n"] == len(prompt_token_ids), "the whole prompt is read each time"
        assert timings["predicted_n"] == len(token_ids)
        decode_s = timings["predicted_ms"] / 1e3
        num_steps = len(token_ids) - 1 - timings.get("draft_n_accepted", 0)
        return Output(token_ids, decode_s, timings["prompt_ms"] / 1e3 + decode_s, num_steps)

    def _ask(self, request: dict[str, Any]) -> dict[str, Any]:
        with closing(HTTPConnection(self._address)) as connection:
            connection.request(
                "POST", "/completion", json.dumps(request), {"Content-Type": "application/json"}
            )
            answer: dict[str, Any] = json.load(connection.getresponse())
        if "error" in answer:
            raise ValueError(f"llama.cpp refused a document: {answer['error']['message']}")
        return answer


class OpenVINO:
    """OpenVINO GenAI's continuous batching (`openvino_server.py`), with as many threads as torch.

    It decodes `decoding.max_batch_size` sequences at a time. The model is a folder next to the
    target, with suffix `-openvino` or `-openvino-int8`, written by `optimum-cli export openvino`.
    """

    def __init__(self, **options: Any) -> None:
        server = Path(__file__).with_name("openvino_server.py")
        command = [sys.executable, str(server), json.dumps(options)]
        self._process = subprocess.Popen(
            command, stdin=PIPE, stdout=PIPE, stderr=DEVNULL, text=True
        )
        # closes its standard input
        self._end = weakref.finalize(self, self._process.communicate)
        self._read()

    @classmethod
    def load(
        cls,
        config: RunConfig,
        lookup: Mapping[str, int] | None = None,
        weights: str = "",
        keys: str | None = None,
    ) -> OpenVINO:
        """Load the configuration's target.

        Args:
            lookup: Options of prompt lookup.
            weights: Suffix of the exported folder.
            keys: Precision of keys and values; None: the activations' precision.

        Raises:
            ValueError: The model cannot be loaded.
        """
        target = config.target
        if importlib.util.find_spec("openvino_genai") is None:
            raise ValueError(
                f"OpenVINO needs the package openvino-genai: {how_to_install('bench')}"
            )
        if config.job.gpus_per_worker:
            raise ValueError("OpenVINO is measured on the CPU only: set job.gpus_per_worker to 0")
        folder = Path(f"{on_this_machine(target.model)}-openvino{weights}")
        if not folder.is_dir():
            raise ValueError(
                f"there is no {folder}; benchmarks/README.md says how to export the target to it"
            )
        precision = {"bfloat16": "bf16", "float16": "f16", "float32": "f32"}[target.dtype]
        if not multiplies_bf16():
            precision = "f32"  # the fastest on such processors, and OpenVINO's fallback
        return cls(
            path=str(folder),
            precision=precision,
            threads=torch.get_num_threads(),
            eos=[*check_pair(target, None).eos_token_ids],
            num_sequences=config.decoding.batch_size,
            lookup=lookup or {},
            keys=keys or precision,
        )

    def generate(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[Output]:
        """Decode and measure wall-clock time to the first and last token."""
        assert self._process.stdin is not None
        self._process.stdin.write(
            json.dumps({"prompts": prompts, "max_new_tokens": max_new_tokens}) + "\n"
        )
        self._process.stdin.flush()
        outputs = []
        for answer in self._read():
            times = answer["times"]
            outputs.append(
                Output(answer["tokens"], times[-1] - times[0], times[-1], num_steps=len(times) - 1)
            )
        return outputs

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._end()
            raise ValueError("OpenVINO cannot serve this target; leave it out")
        return json.loads(line)


PEERS: dict[str, Callable[[RunConfig], Peer]] = {
    "transformers": Transformers.load,
    "transformers-lookup": partial(Transformers.load, options=LOOKUP),
    "llama.cpp": LlamaCpp.load,
    "llama.cpp-ngram": partial(LlamaCpp.load, drafts=NGRAMS),
    "openvino": OpenVINO.load,
    "openvino-lookup": partial(OpenVINO.load, lookup=OPENVINO_LOOKUP),
    "openvino-int8": partial(OpenVINO.load, weights="-int8"),
    "openvino-int8-keys": partial(OpenVINO.load, weights="-int8", keys="u8"),
    "openvino-int8-lookup": partial(OpenVINO.load, weights="-int8", lookup=OPENVINO_LOOKUP),
}
"""Loaders by peer name. Raise ValueError for unsupported targets."""


def write_gguf(model: Any, eos_token_ids: Sequence[int], path: Path) -> None:
    """Write a transformers causal LM as GGUF: matrices in its dtype, vectors in float32.

    Raises:
        ValueError: GGUF cannot describe the model.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, _ARCHITECTURES[config.model_type])
    add_shape(writer, config)
    _add_rope(writer, config.rope_parameters, config.max_position_embeddings)
    _add_vocabulary(writer, config.vocab_size, eos_token_ids)
    for name, tensor in gguf_tensors(model):
        if tensor.dim() == 1:
            writer.add_tensor(name, tensor.float().numpy())
        else:
            writer.add_tensor(
                name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=_TYPES[tensor.dtype]
            )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_shape(writer: gguf.GGUFWriter, config: Any) -> None:
    """Write the sizes of a model."""
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
    """Write the keys of RoPE; `llama3` factors are a tensor. Raises ValueError for other
    options.
    """
    kind = rope["rope_type"]
    writer.add_rope_freq_base(rope["rope_theta"])
    if kind not in ("linear", "yarn"):
        return
    others = {key for key, value in rope.items() if value is not None} - {
        *("rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    }
    if others:
        raise ValueError(
            f"llama.cpp is not measured with the RoPE option {min(others)}; leave it out"
        )
    writer.add_rope_scaling_type(gguf.RopeScalingType(kind))
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(
        rope.get("original_max_position_embeddings") or num_positions
    )


def _add_vocabulary(writer: gguf.GGUFWriter, size: int, eos_token_ids: Sequence[int]) -> None:
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list([f"t{token_id}" for token_id in range(size)])
    writer.add_token_types([gguf.TokenType.NORMAL] * size)
    writer.add_token_merges(["t 0"])  # this kind of vocabulary needs a merge
    keys = (writer.add_eos_token_id, writer.add_eot_token_id, writer.add_eom_token_id)
    for add, token_id in zip(keys, eos_token_ids, strict=False):
        add(token_id)


def gguf_tensors(model: Any) -> Iterator[tuple[str, Tensor]]:
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
        yield (
            name,
            _interleaved(tensor, num_heads) if num_heads and architecture == "llama" else tensor,
        )
    if config.rope_parameters["rope_type"] == "llama3":
        yield "rope_freqs.weight", _frequency_factors(model)


def _interleaved(tensor: Tensor, num_heads: int) -> Tensor:
    """Interleave the halves of each head, as GGUF's `llama` expects."""
    return tensor.reshape(num_heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _frequency_factors(model: Any) -> Tensor:
    inv_freq = model.model.rotary_emb.inv_freq.float()
    exponents = torch.arange(len(inv_freq)) / len(inv_freq)
    return model.config.rope_parameters["rope_theta"] ** -exponents / inv_freq


def _head_dim(config: Any) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
