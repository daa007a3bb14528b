"""Tiny random checkpoints of every family we serve, drafts for them, and engines on them.

A random model soon says one token for ever. Here embeddings are large, attention is sharp and layers add much, so that
the next token depends on far ones and outputs vary; `contract/test_lossless.py` checks that they do.
"""

import itertools
import json
from dataclasses import dataclass, field
from functools import partial

import torch
import yaml
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from specextend.config import RunConfig
from specextend.core import Request, SamplingParams, Values
from specextend.decoding.engine import Engine
from specextend.decoding.stock import honor_time_steps
from specextend.drafters.formats import WEIGHTS_FILE, EagleConfig
from specextend.models.causal_lm import load_tokenizer
from specextend.models.loading import choose_kernels, load_cached_target, load_engine, recent_sizes, target_rows
from specextend.models.model_files import VOCABULARY as VOCABULARY_TENSOR
from specextend.models.pairing import check_pair, load_drafter
from specextend.proof.family import small_model
from tests import published_heads as heads

BACKENDS = ("reference", "sdpa", "compiled")
"""The attention kernels that run here."""
VOCABULARY = 120
NUM_CUT = VOCABULARY // 6
"""Tokens of the target that its draft `cut` lacks."""
EOS_TOKEN_ID = 2
CONTEXT_LENGTH = 2048
PUBLISHED = ("eagle1", "eagle3", "speculators-eagle3")
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
LLAMA3 = heads.LLAMA3 | {"rope_theta": 10000.0}
YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 512}


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What makes one checkpoint unlike another."""

    config: type
    heads: tuple[int, int] = (4, 2)
    tied: bool = False
    rope: Values = field(default_factory=lambda: {"rope_type": "default", "rope_theta": 10000.0})
    head_dim: int = 16


FAMILIES = {
    "llama": Family(config=LlamaConfig),
    "llama-linear": Family(config=LlamaConfig, heads=(3, 3), rope=LINEAR),
    "llama-tied-llama3": Family(config=LlamaConfig, heads=(6, 2), tied=True, rope=LLAMA3),
    "mistral": Family(config=MistralConfig, heads=(4, 1)),
    "mistral-yarn": Family(config=MistralConfig, heads=(8, 1), rope=YARN),
    "qwen2-tied": Family(config=Qwen2Config, tied=True),
    "qwen2-yarn": Family(config=Qwen2Config, heads=(9, 3), rope=YARN),
    "qwen3": Family(config=Qwen3Config, head_dim=24),
    "qwen3-tied-linear": Family(config=Qwen3Config, tied=True, rope=LINEAR),
}


def tiny_tokenizer(vocab_size):
    """Every id is a word, `t0` and up; a text is words with spaces between."""
    vocabulary = {f"t{token_id}": token_id for token_id in range(vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=f"t{EOS_TOKEN_ID}")


def spelling_tokenizer(vocab_size):
    """Every byte is an id, and frequent runs of JSON are."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<unk>", "<s>", "</s>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    values = ({"kind": "audit", "agency": f"an office {n}", "pages": [n], "closed": n % 2 > 0} for n in range(99))
    tokenizer.train_from_iterator(map(json.dumps, values), trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def tiny_model(family, seed, vocab_size=VOCABULARY, hidden_size=48, num_layers=3):
    """A model with random weights."""
    torch.manual_seed(seed)
    config = family.config(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=family.heads[0],
        num_key_value_heads=family.heads[1],
        head_dim=family.head_dim,
        max_position_embeddings=CONTEXT_LENGTH,
        rope_parameters=dict(family.rope),
        tie_word_embeddings=family.tied,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        **({"sliding_window": None} if family.config is MistralConfig else {}),
    )
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()


def perturbed(model, seed):
    """A copy with normal noise on every weight, a fiftieth of the weights' own spread."""
    torch.manual_seed(seed)
    copy = AutoModelForCausalLM.from_config(model.config)
    copy.load_state_dict(model.state_dict())
    with torch.no_grad():
        for weight in copy.parameters():
            if weight.numel() > 1:  # one number has no spread
                weight.add_(torch.randn_like(weight) * weight.std() * 0.02)
    return copy


def write_model(model, folder, tokenizer=tiny_tokenizer):
    """Save a model with a tokenizer for all its rows; returns the folder's name."""
    model.save_pretrained(folder)
    made = tokenizer(model.config.vocab_size)
    if model.config.model_type in ("qwen2", "qwen3_5_moe_text"):  # whose class adds a token of its own otherwise
        made.unk_token = made.pad_token = made.convert_ids_to_tokens(0)
    made.save_pretrained(folder)
    return str(folder)


def write_eagle(folder, model, draft_vocab_size=None, copy_heads=None):
    """An untrained head for `model`, which proposes every token or some that are scattered over the vocabulary."""
    torch.manual_seed(0)
    config = EagleConfig(
        target="tiny",
        vocab_size=model.config.vocab_size,
        hidden_size=model.config.hidden_size,
        num_heads=4,
        num_kv_heads=2,
        head_dim=model.config.hidden_size // 4,
        intermediate_size=2 * model.config.hidden_size,
        rope_theta=10000.0,
        layer_norm_eps=1e-6,
        head_norm_eps=1e-6,
        dtype="float32",
        draft_vocab_size=draft_vocab_size,
        copy_heads=copy_heads,
    )
    weights = {name: torch.randn(shape) * 0.2 for name, shape in config.shapes().items()}
    weights |= {name: torch.ones_like(weight) for name, weight in weights.items() if weight.dim() == 1}
    if draft_vocab_size is not None:
        weights[VOCABULARY_TENSOR] = torch.randperm(model.config.vocab_size)[:draft_vocab_size].sort().values
    folder.mkdir()
    config.save(folder)
    save_file(weights, folder / WEIGHTS_FILE)
    return str(folder)


@dataclass(frozen=True, slots=True)
class Pair:
    """A target and its drafts, on disk."""

    target: str
    drafts: dict[str, str]
    """`good` (the target a little perturbed), `same` (the target), `cut` (`good` without the last tokens), `bad`
    (unrelated, with more tokens than the target), `eagle`, `reduced` (an EAGLE head for a third of the vocabulary),
    `copy` (one with copy heads), `eagle1`, `eagle3` and `speculators-eagle3` (published formats) -> folder"""


def write_pair(folder, family, seed=0, vocab_size=VOCABULARY, tokenizer=tiny_tokenizer):
    """A random target and drafts of every kind."""
    model, write = tiny_model(family, seed, vocab_size), partial(write_model, tokenizer=tokenizer)
    target = write(model, folder / "target")
    good = perturbed(model, seed + 1)
    drafts = {
        "good": write(good, folder / "good"),
        "bad": write(tiny_model(family, seed + 2, vocab_size + 8), folder / "bad"),
        "eagle": write_eagle(folder / "eagle", model),
        "reduced": write_eagle(folder / "reduced", model, vocab_size // 3),
        "copy": write_eagle(folder / "copy", model, vocab_size // 2, copy_heads=2),
        **{name: heads.WRITERS[name](folder / name, model) for name in PUBLISHED},
    }
    good.resize_token_embeddings(vocab_size - vocab_size // 6)
    drafts["cut"] = write(good, folder / "cut")
    return Pair(target, drafts | {"same": target})


def write_with_draft(folder, model, **others):
    """Write a target with its `good` draft, and with other ones."""
    drafts = {"good": perturbed(model, seed=1)} | others
    return Pair(
        write_model(model, folder / "target"), {name: write_model(each, folder / name) for name, each in drafts.items()}
    )


def write_family(folder, name, **values):
    """A small random target of any family of transformers, and its `good` draft."""
    config = AutoConfig.for_model(name, tie_word_embeddings=False, **values).get_text_config()
    model = small_model(config.to_dict())
    model.config.eos_token_id = model.generation_config.eos_token_id = EOS_TOKEN_ID
    return write_with_draft(folder, model)


def write_wide_target(folder):
    """A target whose products have as many inputs as a group of weights in 4 bits, and a `good` draft."""
    return write_with_draft(folder, tiny_model(FAMILIES["llama"], seed=5, hidden_size=64))


def write_looping_pair(folder):
    """A target that looks at its last token alone, so that it soon goes in circles: of 18 tokens, or of 4.

    Drafts are `good` and `bad`, as in any pair.
    """
    model = tiny_model(FAMILIES["llama"], seed=7)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    return write_with_draft(folder, model, bad=tiny_model(FAMILIES["llama"], seed=2))


def load_reference(pair):
    """The target as transformers runs it, in plain attention."""
    config = AutoConfig.from_pretrained(pair.target)
    model = AutoModelForCausalLM.from_pretrained(pair.target, config=config, attn_implementation="eager").eval()
    honor_time_steps(model)
    return model


SECTIONS: dict[str, Values] = yaml.safe_load("""
    input: {path: unused}
    output: {path: unused}
    decoding: {mode: specextend, cache_gib: 0.05}
    attention: {backend: auto, tree: hybrid}
    tree: {nodes: 8, depth: 4, threshold: 0.05}
    cache: {policy: retrieval, chunk_size: 8, top_k_chunks: 6, recent: 16, refresh_every: 3}
""")


def draft_section(pair, draft):
    """The `draft` section of one of the pair's drafts, of `ngram`, of `mtp`, or of `merged-` and a draft's name."""
    name = draft.removeprefix("merged-")
    if name in ("ngram", "mtp"):
        return {"kind": name, "ngram": name != draft}
    kind = "eagle" if name in ("eagle", "reduced", "copy", *PUBLISHED) else "model"
    return {"kind": kind, "model": pair.drafts[name], "ngram": name != draft}


def tiny_config(pair, draft="good", **changes):
    """A run of a pair in fp32; `draft` as in `draft_section`. A change is `section__key=value`."""
    sections = {name: dict(values) for name, values in SECTIONS.items()}
    sections["target"] = {"model": pair.target, "dtype": "float32"}
    sections["draft"] = draft_section(pair, draft)
    for name, value in changes.items():
        section, _, key = name.partition("__")
        sections.setdefault(section, {})[key] = value
    return RunConfig.from_values(sections)


def in_mode(mode):
    """The change that `mode` is: a decoding mode or, for specextend, a cache policy."""
    return {"decoding__mode" if mode in ("autoregressive", "tree") else "cache__policy": mode}


def tiny_engine(pair, draft="good", **changes):
    """The engine of `tiny_config`."""
    return load_engine(tiny_config(pair, draft, **changes))


def engine_with(config, wrap=None, graphs=None, kernels=None, **parts):
    """An engine whose drafter is what `wrap` makes of the configured one; `parts` are other arguments of `Engine`.

    kernels: of the target; None: those that are chosen for a CPU.
    """
    facts = check_pair(config.target, config.active_draft)
    num_rows = target_rows(config, facts)
    kernels = kernels or choose_kernels(config, facts).kernels
    target, lm_head = load_cached_target(config, num_rows, kernels, recent_sizes(config, facts))
    usual = {
        "eos_token_ids": frozenset(facts.eos_token_ids),
        "max_tokens": config.max_tokens(facts.context_length),
        "max_batch_size": config.decoding.max_batch_size,
        "tree": config.tree,
        "tree_attention": config.attention.tree,
        "cache": config.cache,
        "graphs": graphs,
    }
    drafter = load_drafter(config, target, lm_head, num_rows, graphs)
    return Engine(load_tokenizer(config.target.model), target, wrap(drafter) if wrap else drafter, **(usual | parts))


def at_call(engine, call, action):
    """Do something within the target's `call`-th attention from now: 3 a prefill chunk, 6 a verification."""
    attend, numbers = engine.target.attend, itertools.count(1)

    def attend_and_act(*arguments):
        if next(numbers) == call:
            action()
        return attend(*arguments)

    engine.target.attend = attend_and_act


def random_prompt(length, seed=0, vocab_size=VOCABULARY):
    """Tokens without an EOS."""
    generator = torch.Generator().manual_seed(1000 * length + seed)
    return torch.randint(EOS_TOKEN_ID + 1, vocab_size, (length,), generator=generator).tolist()


def request(name, prompt, max_new_tokens=32, **sampling):
    """A request, greedy unless `sampling` says otherwise."""
    return Request(
        request_id=name,
        prompt_token_ids=prompt,
        max_new_tokens=max_new_tokens,
        sampling=SamplingParams(**sampling),
    )


def of_length(length, max_new_tokens, **sampling):
    """A request that is named for the length of its random prompt."""
    return request(str(length), random_prompt(length), max_new_tokens, **sampling)
