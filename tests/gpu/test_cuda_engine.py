"""The whole engine on CUDA, from a configuration; in a file of its own, because kernels need fewer packages."""

from dataclasses import replace

import pytest

from specextend.core import Request, SamplingParams
from tests.tiny_models import FAMILIES, random_prompt, tiny_engine, write_pair

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("backend", ["reference", "auto", "triton"])
def test_output_does_not_depend_on_the_mode_on_cuda(backend, temperature, tmp_path):
    """Lossless on the GPU: the same tokens from every mode, batch 3, with heads that every kernel takes."""
    pair = write_pair(tmp_path, replace(FAMILIES["llama"], head_dim=64))
    outputs = []
    for mode in ("autoregressive", "tree", "specextend"):
        changes = {"decoding__mode": mode, "attention__backend": backend, "target__device": "cuda"}
        changes["attention__tree"] = "auto" if backend == "triton" else "hybrid"
        engine = tiny_engine(pair, decoding__max_batch_size=3, **changes)
        requests = [
            Request(
                request_id=str(seed),
                prompt_token_ids=random_prompt(200 + 50 * seed),
                max_new_tokens=32,
                sampling=SamplingParams(temperature=temperature, seed=seed),
            )
            for seed in range(4)
        ]
        outputs.append({done.request_id: done.token_ids for done in engine.generate(requests)})
    assert outputs[0] == outputs[1] == outputs[2]
