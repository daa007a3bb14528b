"""What a model asks of the machine."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from specextend.decoding.model import count_work, layers_of
from tests.tiny_models import FAMILIES, tiny_model


@pytest.mark.parametrize("family", ["llama", "qwen2-tied"])
def test_weights_and_operations_of_a_prompt_are_those_that_torch_counts(family):
    """A step reads every weight once, of an embedding with an output layer beside it only a row.

    Of attention torch counts the masked half, too.
    """
    model = tiny_model(FAMILIES[family], 0)
    work = count_work(model, layers_of(model), torch.float32)
    read = [weight for name, weight in model.named_parameters() if "embed" not in name or FAMILIES[family].tied]
    assert work.weight_bytes == 4 * sum(weight.numel() for weight in read)
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 50, dtype=torch.long), logits_to_keep=1)
    masked = work.attention_flop_per_pair * (50 * 50 - 50 * 51 // 2)
    assert counter.get_total_flops() == pytest.approx(work.prefill_flop(50, 1, 50 * 51 / 2) + masked, rel=0.01)
