"""The default pair on real reports: in fp32 greedy output is transformers', in bf16 the bytes of plain decoding."""

import importlib.util
from dataclasses import replace
from functools import cache
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from specextend import RunConfig, load_engine
from tests.covering import covering
from tests.reference_outputs import generate
from tests.tiny_models import in_mode, request

ROOT = Path(__file__).parents[2]
TARGET = ROOT / ".models/SmolLM2-135M-Instruct"
HEAD = ROOT / "models/smollm2-135m-eagle"
REPORTS = ROOT / "examples/govreport.parquet"
SHORT = (440, 470, 900)
LONG = (470, 900, 3750)
MAX_NEW_TOKENS = 48
CASES = covering(
    ("retrieval", "full", "streaming", "tree", "autoregressive"),
    ("sdpa", "reference"),
    (3, 1),
    (LONG, SHORT),
)
"""Any two choices meet in a case; the first has the first of each."""

pytestmark = pytest.mark.skipif(not TARGET.is_dir(), reason="needs the default target: make models")


def processor_flags():
    """Return what Linux says that the processor can do."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((set(line.split()) for line in lines if line.startswith("flags")), set())


def config_of(*changes):
    """The shipped configuration. Eight chunks of 32: a document of 440 tokens does not fit the draft's view."""
    paths = [f"input.path={REPORTS}", f"target.model={TARGET}", f"draft.model={HEAD}"]
    own = "target.dtype=float32 cache.top_k_chunks=8 cache.recent=64 cache.refresh_every=4"
    return RunConfig.load(ROOT / "configs/smollm2.yaml", [*paths, *own.split(), *changes])


@pytest.fixture(scope="module")
def prompts():
    """Wanted length -> the rendered prompt of the shipped report that comes closest to it."""
    tokenizer = AutoTokenizer.from_pretrained(TARGET)
    texts = pq.read_table(REPORTS, columns=["text"])["text"].to_pylist()
    asked = [[{"role": "user", "content": f"Summarize.\n\n{text}"}] for text in texts if len(text) < 30_000]
    rendered = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=True)["input_ids"]
    return {length: min(rendered, key=lambda ids: abs(len(ids) - length)) for length in {*SHORT, *LONG}}


@pytest.fixture(scope="module")
def references(prompts):
    """(wanted length, new tokens) -> transformers' output, each made once."""
    load = cache(lambda: AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval())
    return cache(lambda length, max_new_tokens: generate(load(), prompts[length], max_new_tokens))


def complete(prompts, lengths, max_new_tokens, *changes, keeps_log_probs=False, **sampling):
    engine = load_engine(config_of(*changes))
    requests = [request(str(length), prompts[length], max_new_tokens, **sampling) for length in lengths]
    return list(engine.generate([replace(each, keeps_log_probs=keeps_log_probs) for each in requests]))


def by_mode(mode):
    """The change that a decoding mode is or, for specextend, a cache policy."""
    [(key, value)] = in_mode(mode).items()
    return f"{key.replace('__', '.')}={value}"


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "mode, backend, batch, lengths",
    [("retrieval", "sdpa", 1, SHORT[:1]), *(pytest.param(*case, marks=pytest.mark.slow) for case in CASES)],
)
def test_reports_come_out_as_from_transformers(mode, backend, batch, lengths, prompts, references, ties):
    """Documents of 440 to 3,750 tokens: every policy, backend, batch and mode."""
    completions = complete(
        prompts,
        lengths,
        MAX_NEW_TOKENS,
        f"attention.backend={backend}",
        f"decoding.max_batch_size={batch}",
        by_mode(mode),
    )
    assert len(completions) == len(lengths)
    assert mode != "retrieval" or min(each.stats.retrieval_coverage for each in completions) < 1, "something is hidden"
    for completion in completions:
        length = int(completion.request_id)
        what = f"{mode}-{backend}-{batch}, {length} tokens"
        ties.assert_equal(completion.token_ids, references(length, MAX_NEW_TOKENS), what)


SAME_BYTES = [
    (("retrieval", "auto", 3, 12, 2), 0.0, None),
    (("retrieval", "auto", 3, 12, 2), 0.0, "int8"),
    *(
        pytest.param(case, temperature, scheme, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])
        for case in covering(("retrieval", "full", "tree"), ("auto", "hybrid"), (1, 3, 4), (12, 31), (1, 2), strength=2)
        for temperature, scheme in ((0.0, None), (0.7, "int8"))
    ),
]
"""Policy or mode, tree attention, batch, nodes, threads; the temperature; and the scheme of weights."""


@pytest.mark.skipif(
    importlib.util.find_spec("numba") is None or not {"avx2", "fma"} <= processor_flags(),
    reason="needs the compiled kernels: numba, and a processor with AVX2",
)
@pytest.mark.parametrize("case, temperature, scheme", SAME_BYTES)
def test_in_bf16_the_tokens_are_those_of_plain_decoding(case, temperature, scheme, prompts, restored_threads):
    """Near ties are not excused: each row of a step has the same bits whatever stands beside it."""
    policy, attention, batch, nodes, threads = case
    lengths, new = (SHORT[:2], 32) if temperature == 0 and nodes == 12 else (LONG, MAX_NEW_TOKENS)
    sampling = {"temperature": temperature, "seed": 5}
    weights = ("target.dtype=bfloat16", *([f"target.quantize={scheme}"] if scheme else []))
    plainly = "decoding.mode=autoregressive", "decoding.max_batch_size=1"
    keeps = nodes == 12  # without them a greedy step leaves its logits on the device
    plain = complete(prompts, lengths, new, *weights, *plainly, keeps_log_probs=keeps, **sampling)
    torch.set_num_threads(threads)
    found = complete(
        prompts,
        lengths[::-1],
        new,
        *weights,
        f"attention.tree={attention}",
        f"tree.nodes={nodes}",
        f"decoding.max_batch_size={batch}",
        by_mode(policy),
        keeps_log_probs=keeps,
        **sampling,
    )
    assert sum(each.stats.num_accepted_tokens for each in found) > 0
    said, expected = ({each.request_id: (each.token_ids, each.log_probs) for each in side} for side in (found, plain))
    assert said == expected
    assert all(len(each.log_probs) == len(each.token_ids) * keeps for each in found)
