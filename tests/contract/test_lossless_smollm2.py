"""The default pair on real reports, in fp32: greedy output is what transformers' `generate` gives."""

from __future__ import annotations

import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specextend import Completion, Request, RunConfig, load_engine
from tests.covering import covering
from tests.reference_outputs import Reference, Ties, generate

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".models/SmolLM2-135M-Instruct"
HEAD = ROOT / "models/smollm2-135m-eagle"
WEIGHTS_FILE = "model.safetensors"
SHORT = (440, 470, 900)
LONG = (470, 900, 3750)
MAX_NEW_TOKENS = 48
CASES = covering(
    ("retrieval", "full", "streaming", "tree", "autoregressive"),
    ("sdpa", "reference"),
    (3, 1),
    ("trained", "random"),
    (LONG, SHORT),
)
"""Any two choices meet in a case; the first has the first of each."""

pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason="needs the default target: make models")


def config_of(*changes: str, dtype: str = "float32") -> RunConfig:
    """The shipped configuration. Eight chunks of 32: a document of 440 tokens does not fit the draft's view."""
    return RunConfig.load(
        ROOT / "configs/smollm2.yaml",
        [
            f"input.path={ROOT / 'examples/govreport.parquet'}",
            f"target.model={TARGET}",
            f"target.dtype={dtype}",
            "target.device=cpu",
            f"draft.model={HEAD}",
            "cache.top_k_chunks=8",
            "cache.recent=64",
            "cache.refresh_every=4",
            *changes,
        ],
    )


@pytest.fixture(scope="module")
def prompts() -> dict[int, list[int]]:
    """Wanted length -> the rendered prompt of the shipped report that comes closest to it."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = pq.read_table(ROOT / "examples/govreport.parquet", columns=["text"])["text"].to_pylist()
    asked = [[{"role": "user", "content": f"Summarize.\n\n{text}"}] for text in texts if len(text) < 30_000]
    rendered = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    return {length: min(rendered, key=lambda ids: abs(len(ids) - length)) for length in {*SHORT, *LONG}}


@pytest.fixture(scope="module")
def references(prompts):
    """(wanted length, new tokens) -> transformers' output, each made once."""
    load = cache(lambda: AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval())

    @cache
    def outputs(length: int, max_new_tokens: int) -> Reference:
        return generate(load(), prompts[length], max_new_tokens)

    return outputs


@pytest.fixture(scope="module")
def ties(request):
    ties = Ties()
    yield ties
    request.config.pluginmanager.get_plugin("terminalreporter").write_line(f"\n{ties.summary()}")


@pytest.fixture(scope="module")
def heads(tmp_path_factory) -> dict[str, Path]:
    """The shipped head, and one of the same shape that was never trained."""
    folder = tmp_path_factory.mktemp("heads") / "random"
    folder.mkdir()
    shutil.copy(HEAD / "config.json", folder)
    generator = torch.Generator().manual_seed(0)
    weights = load_file(HEAD / WEIGHTS_FILE)
    for weight in weights.values():
        if weight.dim() == 2:
            weight.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
    save_file(weights, folder / WEIGHTS_FILE)
    return {"trained": HEAD, "random": folder}


def complete(prompts, lengths, max_new_tokens: int, *changes: str) -> list[Completion]:
    engine = load_engine(config_of(*changes))
    requests = [
        Request(request_id=str(length), prompt_token_ids=prompts[length], max_new_tokens=max_new_tokens)
        for length in lengths
    ]
    return list(engine.generate(requests))


def test_a_short_report_comes_out_as_from_transformers(prompts, references, ties):
    """The product's own configuration, with retrieval that hides some of it."""
    [completion] = complete(prompts, SHORT[:1], 24, "tree.nodes=12")
    assert completion.stats.retrieval_coverage < 1, "something is hidden"
    assert completion.stats.num_spec_steps > 0
    ties.assert_equal(completion.token_ids, references(SHORT[0], 24), "440 tokens")


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(("mode", "backend", "batch", "head", "lengths"), CASES)
def test_reports_come_out_as_from_transformers(mode, backend, batch, head, lengths, prompts, references, ties, heads):
    """Documents of 440 to 3,750 tokens: every policy, backend, batch and mode, with a good head and a random one."""
    own = mode in ("tree", "autoregressive")
    completions = complete(
        prompts,
        lengths,
        MAX_NEW_TOKENS,
        f"attention.backend={backend}",
        f"decoding.max_batch_size={batch}",
        f"draft.model={heads[head]}",
        f"decoding.mode={mode}" if own else f"cache.policy={mode}",
    )
    assert len(completions) == len(lengths)
    for completion in completions:
        length = int(completion.request_id)
        what = f"{mode}-{backend}-{batch}-{head}, {length} tokens"
        ties.assert_equal(completion.token_ids, references(length, MAX_NEW_TOKENS), what)


PEAK = """
import re, sys
from pathlib import Path

from specextend import Request, load_engine
from tests.contract.test_lossless_smollm2 import config_of

engine = load_engine(config_of("decoding.cache_gib=0.2", dtype="bfloat16"))
[completion] = engine.generate([Request(request_id="a", prompt_token_ids=[1000] * 8000, max_new_tokens=2)])
assert completion.stats.num_prompt_tokens == 8000
[peak] = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
sys.stdout.write(str(int(peak) * 1024))
"""


@pytest.mark.slow
def test_a_prompt_of_8000_tokens_is_read_in_bounded_memory():
    """Weights, caches and 1.5 GiB: a mask of 8,000 squared or logits of all rows would alone take 1.5 GiB.

    The peak of a whole process is measured, libraries included; `ru_maxrss` would count the parent's, too.
    """
    weights = sum(file.stat().st_size for file in (TARGET / WEIGHTS_FILE, HEAD / WEIGHTS_FILE))
    kv_cache = int(0.2 * 2**30) + 2 * 12_000 * 2 * 3 * 64 * 2  # the head's two caches of one layer
    run = subprocess.run([sys.executable, "-c", PEAK], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(run.stdout) < weights + kv_cache + 1.5 * 2**30
