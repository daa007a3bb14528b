"""The limits of the machine, and what a model asks of it."""

from __future__ import annotations

import pytest
import torch

from specextend.decoding import limits
from specextend.decoding.kept import cache_folder
from specextend.decoding.limits import MachineLimits, count_work, load_limits, measure_limits
from specextend.models import DTYPES, TargetOptions, load_target, read_facts, skeleton
from tests.tiny_models import FAMILIES, tiny_model, write_model


@pytest.mark.parametrize("family", ["llama", "llama-tied-llama3", "qwen2-tied"])
def test_the_work_of_a_model_is_counted_from_its_shapes(tmp_path, family):
    """A step reads every weight once, of an embedding with an output layer beside it only a row."""
    options = TargetOptions(model=write_model(tiny_model(FAMILIES[family], 0), tmp_path), dtype="bfloat16")
    work, model = count_work(skeleton(options), DTYPES[options.dtype]), load_target(options, "sdpa")
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
    work, model = count_work(skeleton(options), DTYPES[options.dtype]), load_target(options, "eager")
    with FlopCounterMode(display=False) as counter:
        model(torch.ones(1, 50, dtype=torch.long), logits_to_keep=1)
    masked = work.attention_flop_per_pair * (50 * 50 - 50 * 51 // 2)
    assert counter.get_total_flops() == pytest.approx(work.prefill_flop(50) + masked, rel=0.01)


def test_the_highest_limits_that_were_measured_are_kept_for_the_device(monkeypatch, tmp_path):
    """A neighbour lowers a measurement without a sign, and once it was kept no start ever corrected it."""
    measured = [(5e9, 9e11), (1e10, 8e11), (4e9, 2e12), (3e9, 1e12)]
    quiet, now = [False, True, True, True], [0.0]
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(limits, "measure_limits", lambda *_: MachineLimits(*measured.pop(0)))
    monkeypatch.setattr(limits, "measure_undisturbed", lambda measure, patience_s: (measure(), quiet.pop(0)))
    monkeypatch.setattr(limits.time, "time", lambda: now[0])

    def at(hour: float) -> MachineLimits:
        now[0] = 1e9 + 3600 * hour
        return load_limits(torch.device("cpu"), torch.float16)

    assert at(0) == MachineLimits(5e9, 9e11)
    assert at(0.1) == MachineLimits(1e10, 9e11), "the machine was busy, so the next start measures again"
    assert at(0.9) == MachineLimits(1e10, 9e11), "it was quiet, so the next hour's starts do not"
    assert at(1.2) == at(2.1) == MachineLimits(1e10, 2e12)
    for path in cache_folder().glob("limits-*.json"):
        path.write_text(path.read_text()[:-20])
    assert at(2.15) == MachineLimits(3e9, 1e12), "what was cut off is measured again"


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_limits_are_those_of_some_real_machine(dtype):
    """Between an old laptop and a rack: a wrong unit is off by a thousand."""
    found = measure_limits(torch.device("cpu"), DTYPES[dtype])
    assert 1e8 < found.read_bytes_per_s < 1e13
    assert 1e8 < found.flop_per_s < 1e15
