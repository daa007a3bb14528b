"""Small untrained EAGLE heads, written as the published ones are: file names, keys and tensor names of each format."""

import json

import torch
import yaml
from safetensors.torch import save_file

LLAMA3 = yaml.safe_load("""
    rope_type: llama3
    factor: 8.0
    low_freq_factor: 1.0
    high_freq_factor: 4.0
    original_max_position_embeddings: 256
""")
"""RoPE of Llama 3, made shorter."""
LAYER = yaml.safe_load("""
    model_type: llama
    architectures: [LlamaForCausalLM]
    intermediate_size: 64
    num_hidden_layers: 1
    num_attention_heads: 4
    num_key_value_heads: 2
    head_dim: 12
    hidden_act: silu
    rms_norm_eps: 1.0e-5
    max_position_embeddings: 2048
    torch_dtype: float16
""")
HEADS, KV_HEADS, HEAD_DIM, MLP = 4, 2, 12, 64
LAYER_IDS = [0, 1, 2]  # outputs, counted from 0: the tiny targets have three layers
INPUT_IDS = {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}


def matrix(*shape):
    return torch.randn(*shape) * 0.2


def norm(size):
    return 1 + torch.randn(size) * 0.2


def layer(prefix, hidden, width, *, qkv_bias=False):
    """A Llama layer without its input norm, whose q, k and v read `width` numbers."""
    sizes = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    tensors = {f"self_attn.{name}_proj.weight": matrix(size, width) for name, size in sizes.items()}
    if qkv_bias:
        tensors |= {f"self_attn.{name}_proj.bias": matrix(size) for name, size in sizes.items()}
    tensors |= {
        "self_attn.o_proj.weight": matrix(hidden, HEADS * HEAD_DIM),
        "mlp.gate_proj.weight": matrix(MLP, hidden),
        "mlp.up_proj.weight": matrix(MLP, hidden),
        "mlp.down_proj.weight": matrix(hidden, MLP),
        "post_attention_layernorm.weight": norm(hidden),
    }
    return {prefix + name: tensor for name, tensor in tensors.items()}


def llama_config(vocab_size, hidden, **values):
    return LAYER | {"vocab_size": vocab_size, "hidden_size": hidden} | values


def vocabulary_maps(vocab_size, draft_vocab_size):
    """`d2t`: target id minus draft id of each draft id. `t2d`: whether the draft has a target id."""
    kept = torch.randperm(vocab_size)[:draft_vocab_size].sort().values
    mask = torch.zeros(vocab_size, dtype=torch.bool)
    mask[kept] = True
    return {"d2t": kept - torch.arange(draft_vocab_size), "t2d": mask}


def eagle3_tensors(prefix, hidden, target_hidden, draft_vocab_size):
    return {
        "fc.weight": matrix(hidden, 3 * target_hidden),
        **layer(prefix, hidden, 2 * hidden),
        f"{prefix}input_layernorm.weight": norm(hidden),
        f"{prefix}hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
        "lm_head.weight": matrix(draft_vocab_size, hidden) * 4,  # sure of itself, so that trees are deep
    }


def eagle1(model, hidden, vocab_size):
    """SafeAILab's EAGLE-1 and EAGLE-2: a copy of the target's embedding, `fc` with a bias, no input or last norm."""
    tensors = {
        "embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(),
        "fc.weight": matrix(hidden, 2 * hidden),
        "fc.bias": matrix(hidden),
        **layer("layers.0.", hidden, hidden),
        "layers.0.self_attn.rotary_emb.inv_freq": torch.ones(HEAD_DIM // 2),
    }
    return llama_config(vocab_size, hidden, bias=True, rope_scaling=None), tensors


def eagle1_biased(model, hidden, vocab_size):
    """One for a Qwen2 target: biases of q, k and v, stretched RoPE; its own LM head and embedding."""
    tensors = {
        "embed_tokens.weight": matrix(vocab_size, hidden),
        "lm_head.weight": matrix(vocab_size, hidden),
        "fc.weight": matrix(hidden, 2 * hidden),
        **layer("layers.0.", hidden, hidden, qkv_bias=True),
    }
    rope = {"rope_theta": 1e6, "rope_scaling": {"type": "linear", "factor": 4.0}}
    return llama_config(vocab_size, hidden, model_type="qwen2", bias=False, **rope), tensors


def eagle3(model, hidden, vocab_size):
    """SafeAILab's EAGLE-3 as SGLang reads it: `midlayer`, an LM head for a part of the vocabulary, no embedding."""
    tensors = eagle3_tensors("midlayer.", hidden, hidden, vocab_size // 2)
    config = llama_config(vocab_size, hidden, rope_theta=500000.0, rope_scaling=LLAMA3) | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": vocab_size // 2,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": LAYER_IDS, "use_aux_hidden_state": True},
    }
    return config, tensors | vocabulary_maps(vocab_size, vocab_size // 2)


def eagle3_narrow(model, _, vocab_size):
    """A head narrower than its target, with an embedding of its own and the whole vocabulary; norms of q and k."""
    hidden = 32
    tensors = {
        **eagle3_tensors("layers.0.", hidden, model.config.hidden_size, vocab_size),
        "embed_tokens.weight": matrix(vocab_size, hidden),
        "layers.0.self_attn.q_norm.weight": norm(HEAD_DIM),
        "layers.0.self_attn.k_norm.weight": norm(HEAD_DIM),
    }
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 512}
    config = llama_config(vocab_size, hidden, rope_parameters=rope, model_type="qwen3") | {
        "target_hidden_size": model.config.hidden_size,
        **INPUT_IDS,
    }
    lm_head = {"lm_head.weight": tensors.pop("lm_head.weight")}
    return config, {f"model.{name}": tensor for name, tensor in tensors.items()} | lm_head


def speculators_eagle3(model, hidden, vocab_size):
    """`speculators`' eagle3: the layer's config apart, inputs of layers, a residual that is normed by default."""
    tensors = {
        **eagle3_tensors("layers.0.", hidden, hidden, vocab_size // 3),
        **vocabulary_maps(vocab_size, vocab_size // 3),
        "input_norm.weight": norm(3 * hidden),
        "embed_tokens.weight": model.get_input_embeddings().weight.detach().clone(),
    }
    layer_config = llama_config(vocab_size, hidden)
    del layer_config["max_position_embeddings"], layer_config["hidden_act"]  # transformers leaves out its defaults
    config = yaml.safe_load("""
        architectures: [Eagle3DraftModel]
        speculators_model_type: eagle3
        speculators_version: 0.3.0
        speculators_config: {algorithm: eagle3, verifier: {name_or_path: tiny}}
        norm_before_fc: true
        target_hidden_size: null
    """)
    own = {"transformer_layer_config": layer_config, "draft_vocab_size": vocab_size // 3}
    return config | own | INPUT_IDS, tensors


def speculators_eagle(model, hidden, vocab_size):
    """`speculators`' eagle with all its options: norms of embedding, layer and output, and a bias of the fusion."""
    tensors = {
        "embedding_layernorm.weight": norm(hidden),
        "fusion_fc.weight": matrix(hidden, 2 * hidden),
        "fusion_fc.bias": matrix(hidden),
        **layer("transformer.", hidden, hidden),
        "transformer.input_layernorm.weight": norm(hidden),
        "pre_lm_head_layernorm.weight": norm(hidden),
    }
    config = yaml.safe_load("""
        architectures: [EagleSpeculator, LlamaDecoderLayer]
        speculators_model_type: eagle
        transformer_layer_architecture: LlamaDecoderLayer
        layernorms: true
        fusion_bias: true
    """)
    return config | {"transformer_layer_config": llama_config(vocab_size, hidden, rope_theta=20000.0)}, tensors


def eagle31(model, hidden, vocab_size):
    """EAGLE-3.1 in a flat file: a norm of each feature, and outputs that are fed back after the last norm."""
    config, tensors = eagle3(model, hidden, vocab_size)
    norms = {f"fc_norm.{number}.weight": norm(hidden) for number in range(3)}
    return config | {"fc_norm": True, "norm_output": True}, tensors | norms


def eagle3_nested(model, hidden, vocab_size):
    """NVIDIA's: what distinguishes the head stands in `eagle_config`, beside what all of them have."""
    config, tensors = eagle3(model, hidden, vocab_size)
    config["eagle_config"] |= yaml.safe_load("""
        use_input_layernorm_in_first_layer: true
        use_last_layernorm: true
        parallel_draft_step: 1
        norm_before_fc: true
        use_mtp_layernorm: false
        next_layer_regular: true
    """)
    return config, tensors | {"input_norm.weight": norm(3 * hidden)}


def writer(seed, describe):
    """What writes a head of a format for a target model into a folder."""

    def write(folder, model):
        torch.manual_seed(seed)
        config, tensors = describe(model, model.config.hidden_size, model.config.vocab_size)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        return str(folder)

    return write


FORMATS = (eagle1, eagle1_biased, eagle3, eagle3_narrow, speculators_eagle3, speculators_eagle, eagle31, eagle3_nested)
WRITERS = {each.__name__.replace("_", "-"): writer(seed, each) for seed, each in enumerate(FORMATS)}
"""Format or variant -> what writes it for a target model into a folder."""
