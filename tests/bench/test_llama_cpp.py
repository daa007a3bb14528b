"""llama.cpp as a side, run for real on tiny random models."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specextend import RunConfig
from specextend.bench.llama_cpp import LlamaCppSide, describe_llama_cpp, load_llama_cpp, write_gguf
from specextend.bench.sides import TransformersSide, default_sides, describe_sides
from tests.tiny_models import EOS_TOKEN_ID, FAMILIES, random_prompt, tiny_config, tiny_model, write_model

SERVED = {name: family for name, family in FAMILIES.items() if not name.startswith("qwen2")} | {
    "qwen2-tied": replace(FAMILIES["qwen2-tied"], head_dim=12),  # llama.cpp has no Qwen2 with other heads than 48 / 4
    "qwen2-yarn": replace(FAMILIES["qwen2-yarn"], heads=(4, 2), head_dim=12),
}
NEAR_TIE = 0.02
"""Difference of two logits that rounding may reverse: attention of these models is sharp."""


@pytest.fixture(autouse=True)
def _threads_kept():
    """Tiny models are slower on many threads, and llama.cpp takes as many as torch has."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def llama_cpp(model: Any, folder: Path, eos_token_ids: tuple[int, ...] = (EOS_TOKEN_ID,)) -> LlamaCppSide:
    path = folder / "tiny.gguf"
    write_gguf(model, eos_token_ids, path)
    return LlamaCppSide(path, 1024, "F32")


@pytest.mark.parametrize("name", SERVED)
def test_llama_cpp_decodes_the_same_model(name, tmp_path):
    """Every architecture and RoPE: a wrong layout of heads or wrong angles would still decode, fast, some nonsense."""
    model = tiny_model(SERVED[name], seed=0)
    prompt = random_prompt(300)
    side = llama_cpp(model, tmp_path)
    ours, theirs = TransformersSide(model, [EOS_TOKEN_ID]).run(prompt, 24), side.run(prompt, 24)
    for index, (a, b) in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False)):
        if a != b:
            logits = model(torch.tensor([prompt + ours.token_ids[:index]])).logits[0, -1]
            assert logits[a] - logits[b] < NEAR_TIE, f"token {index}"
            return
    assert theirs.token_ids == ours.token_ids


def test_the_first_token_is_in_no_decoding_time(tmp_path):
    """Speeds of the other sides leave it out: llama.cpp counts it among `predicted_n`, its time to the prompt."""
    side = llama_cpp(tiny_model(FAMILIES["llama"], seed=0), tmp_path)
    prompt = random_prompt(300)
    one, many = side.run(prompt, 1), side.run(prompt, 33)
    assert one.decode_s <= 1e-5 < one.total_s
    assert (len(many.token_ids), many.num_steps, many.num_decoded_tokens) == (33, 32, 32)
    assert 0 < many.decode_s < many.total_s


@pytest.mark.parametrize("place", range(3))
def test_llama_cpp_stops_at_every_eos(place, tmp_path):
    """Some models have three; the EOS itself is part of the output, as on the other sides."""
    model = tiny_model(FAMILIES["llama"], seed=0)
    prompt = random_prompt(40)
    whole = TransformersSide(model, ()).run(prompt, 24).token_ids
    last = next(token_id for token_id in whole[8:] if token_id not in whole[:8])
    others = [token_id for token_id in range(120) if token_id not in whole][:2]
    eos = (*others[:place], last, *others[place:])
    assert llama_cpp(model, tmp_path, eos).run(prompt, 24).token_ids == whole[: whole.index(last) + 1]


def test_no_document_is_read_from_the_cache_of_another(tmp_path):
    """A, B, A: the second run of a prompt decodes what the first did; `run` checks that it reads the whole prompt."""
    side = llama_cpp(tiny_model(FAMILIES["llama"], seed=0), tmp_path)
    first, _, again = (side.run(random_prompt(length), 16) for length in (300, 40, 300))
    assert first.token_ids == again.token_ids


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_the_target_is_loaded_in_its_own_dtype(dtype, pairs, tmp_path, monkeypatch, capfd):
    """Without a line of llama.cpp's log, and without a file left behind."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    config = with_target(tiny_config(pairs("llama")), dtype=dtype)
    capfd.readouterr()  # what was written before
    measured = load_llama_cpp(config).run(random_prompt(40), 8)
    assert 1 <= len(measured.token_ids) <= 8
    assert not [*tmp_path.iterdir()]
    assert capfd.readouterr() == ("", "")


def test_the_build_stands_in_the_figures(pairs):
    """Which instructions a wheel was built for decides its speed."""
    described = describe_sides(tiny_config(pairs("llama")), ["llama.cpp"])["llama.cpp"]
    assert described["system_info"].startswith("CPU")
    assert described["xllamacpp"]
    assert (described["cache"], described["flash_attention"]) == ("F32", "auto")


def without_wheel(config: RunConfig, monkeypatch: pytest.MonkeyPatch, folder: Path) -> RunConfig:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    return config


def on_gpu(config: RunConfig, monkeypatch: pytest.MonkeyPatch, folder: Path) -> RunConfig:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    return with_target(config, device="cuda")


def without_eos(config: RunConfig, monkeypatch: pytest.MonkeyPatch, folder: Path) -> RunConfig:
    model = tiny_model(FAMILIES["llama"], seed=0)
    model.config.eos_token_id = model.generation_config.eos_token_id = None
    return with_target(config, model=write_model(model, folder))


def with_target(config: RunConfig, **values: Any) -> RunConfig:
    return config.model_copy(update={"target": replace(config.target, **values)})


@pytest.mark.parametrize(
    ("prevent", "message"),
    [
        (without_wheel, r"pip install 'specextend\[bench\]'"),
        (on_gpu, "on the CPU only"),
        (without_eos, "has 0"),
    ],
)
def test_where_llama_cpp_cannot_run_it_is_left_out_or_says_why(prevent, message, pairs, monkeypatch, tmp_path):
    """A comparison that nobody asked to have llama.cpp in goes on without it; one that was asked for ends at once."""
    config = tiny_config(pairs("llama"))
    assert "llama.cpp" in default_sides(config)
    config = prevent(config, monkeypatch, tmp_path)
    assert "llama.cpp" not in default_sides(config)
    with pytest.raises(ValueError, match=message) as refused:
        describe_llama_cpp(config)
    assert "\n" not in str(refused.value)


def test_a_model_that_llama_cpp_refuses_ends_in_one_line(tmp_path):
    """Qwen2 whose heads are wider than its layers, as this project's own tests have them, does not exist there."""
    with pytest.raises(ValueError, match=r"leave llama\.cpp out of --sides"):
        llama_cpp(tiny_model(FAMILIES["qwen2-tied"], seed=0), tmp_path)


def test_an_option_of_rope_without_a_key_is_refused(tmp_path):
    """Left out silently, the model would be another."""
    rope = FAMILIES["mistral-yarn"].rope | {"beta_fast": 16.0}
    with pytest.raises(ValueError, match="beta_fast"):
        write_gguf(tiny_model(replace(FAMILIES["mistral-yarn"], rope=rope), seed=0), (2,), tmp_path / "tiny.gguf")
