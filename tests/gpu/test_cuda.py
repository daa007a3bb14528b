"""The CUDA path, for `scripts/gpu_check.sh`; until it has passed, `auto` does not choose sdpa on a GPU."""

from __future__ import annotations

import pytest
import torch

from specextend.attention.backends import attend_cuda, attend_reference
from specextend.attention.plan import KeySpan
from specextend.config import RunConfig
from specextend.core import Request, SamplingParams
from specextend.decoding.sampling import gumbel_noise
from specextend.loading import load_engine

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", ["prefix", "causal", "tree"])
@pytest.mark.parametrize("group", [1, 3, 8])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-4), (torch.bfloat16, 2e-2)])
def test_sdpa_equals_the_reference_on_cuda(dtype, error, group, kind):
    """The flash and memory-efficient kernels have other traps than the CPU's: mask alignment, padded LSE."""
    generator = torch.Generator("cuda").manual_seed(0)
    k, v = (torch.randn(2, 1024, 64, generator=generator, device="cuda", dtype=dtype) for _ in range(2))
    q = torch.randn(2, 17, 2 * group, 64, generator=generator, device="cuda", dtype=dtype)
    tree = torch.ones(17, 17, dtype=torch.bool, device="cuda").tril().expand(2, -1, -1)
    lengths = [17, 17] if kind == "causal" else [300, 77]
    span = KeySpan([0, 512], lengths, mask=tree if kind == "tree" else None, causal=kind == "causal")
    out, lse = attend_cuda(q, k, v, span, 0.125)
    expected_out, expected_lse = attend_reference(q, k, v, span, 0.125)
    torch.testing.assert_close(out, expected_out, atol=error, rtol=error)
    torch.testing.assert_close(lse, expected_lse, atol=error, rtol=error)


def test_noise_is_the_same_on_every_device():
    """A seed must give the same summary on a laptop and on a cluster, up to the rounding of logits."""
    positions = torch.tensor([0, 1, 5000])
    token_ids = torch.arange(4096)
    expected = gumbel_noise(7, positions, token_ids)
    found = gumbel_noise(7, positions.cuda(), token_ids.cuda())
    torch.testing.assert_close(found.cpu(), expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("backend", ["reference", "sdpa"])
def test_output_does_not_depend_on_the_mode_on_cuda(backend, temperature):
    """Lossless on the GPU: the same tokens from every mode, batch 3."""
    outputs = []
    for mode in ("autoregressive", "tree", "specextend"):
        overrides = [f"decoding.mode={mode}", f"attention.backend={backend}", "target.device=cuda"]
        engine = load_engine(RunConfig.load("configs/tiny-random.yaml", overrides))
        requests = [
            Request(
                request_id=str(seed),
                prompt_token_ids=[5 + (seed * 7 + i * i) % 400 for i in range(200 + 50 * seed)],
                max_new_tokens=32,
                sampling=SamplingParams(temperature=temperature, seed=seed),
            )
            for seed in range(4)
        ]
        outputs.append({done.request_id: done.token_ids for done in engine.generate(requests)})
    assert outputs[0] == outputs[1] == outputs[2]
