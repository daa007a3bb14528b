"""What a model asks of the machine."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from specextend.decoding.model import count_work, layers_of
from specextend.models.causal_lm import DTYPES, TargetOptions, load_causal_lm, read_facts
from tests.tiny_models import FAMILIES, tiny_model, write_model


def without_weights(folder):
    """The modules of a model on `meta`, as a plan counts them."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))


def work_of(options):
    model = without_weights(options.model)
    return count_work(model, layers_of(model), DTYPES[options.dtype])


@pytest.mark.parametrize("family", ["llama", "llama-tied-llama3", "qwen2-tied"])
def test_the_work_of_a_model_is_counted_from_its_shapes(tmp_path, family):
    """A step reads every weight once, of an embedding with an output layer beside it only a row."""
    options = TargetOptions(model=write_model(tiny_model(FAMILIES[family], 0), tmp_path), dtype="bfloat16")
    work = work_of(options)
    model = load_causal_lm(options.model, options.dtype, "cpu")
    read = [weight for name, weight in model.named_parameters() if "embed" not in name or FAMILIES[family].tied]
    matrices = [weight for name, weight in model.named_parameters() if "layers" in name and weight.dim() == 2]
    assert work.weight_bytes == sum(weight.numel() * 2 for weight in read)
    assert work.layer_parameters == sum(weight.numel() for weight in matrices)
    assert work.head_parameters == model.config.vocab_size * model.config.hidden_size
    assert work.kv_bytes_per_token == read_facts(options.model).kv_bytes_per_token("bfloat16")


def test_operations_of_a_prompt_are_those_that_torch_counts(tmp_path):
    """All but attention, whose masked half torch counts too."""
    from torch.utils.flop_counter import FlopCounterMode

    options = TargetOptions(model=write_model(tiny_model(FAMILIES["llama"], 0), tmp_path), dtype="float32")
    work = work_of(options)
    model = load_causal_lm(options.model, options.dtype, "cpu")
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 50, dtype=torch.long), logits_to_keep=1)
    masked = work.attention_flop_per_pair * (50 * 50 - 50 * 51 // 2)
    assert counter.get_total_flops() == pytest.approx(work.prefill_flop(50, 1, 50 * 51 / 2) + masked, rel=0.01)
