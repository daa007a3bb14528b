"""OpenVINO GenAI as a process of its own, which answers one line of JSON with another and ends with its standard input.

Beside torch in one process both are slower: each has a pool of threads of its own.

    python benchmarks/openvino_server.py '{"path": "target-openvino", "precision": "bf16", "threads": 2, "eos": [2]}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import Any


def load(path: str, precision: str, threads: int, eos: Sequence[int]) -> Callable[[list[int], int], dict[str, Any]]:
    """Load an exported model; return what decodes a prompt greedily and says the tokens and seconds of both phases."""
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching, scheduler.dynamic_split_fuse = False, False
    scheduler.max_num_batched_tokens, scheduler.max_num_seqs = 1 << 16, 1
    options = {"INFERENCE_PRECISION_HINT": precision, "KV_CACHE_PRECISION": precision, "INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", options)

    def answer(prompt: list[int], max_new_tokens: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = max_new_tokens, False, {*eos}
        [result] = pipeline.generate([openvino.Tensor(np.array([prompt]))], [config])
        figures = result.perf_metrics
        return {
            "tokens": list(result.m_generation_ids[0]),
            "first_s": figures.get_ttft().mean / 1e3,
            "total_s": figures.get_generate_duration().mean / 1e3,
        }

    return answer


def say(value: Any) -> None:
    """Print a value as one line, at once."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    decode = load(**json.loads(sys.argv[1]))
    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        say(decode(request["prompt"], request["max_new_tokens"]))
