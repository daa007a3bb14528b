"""OpenVINO GenAI in a separate process, because thread pools of torch would slow down both.

Answers lines of JSON, and ends with its standard input.

    python benchmarks/openvino_server.py '{"path": "target-openvino", "precision": "bf16",
        "keys": "bf16", "threads": 2, "eos": [2]}'
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Answer = dict[str, Any]


def load(
    path: str,
    precision: str,
    keys: str,
    threads: int,
    eos: Sequence[int],
    num_sequences: int = 1,
    lookup: Mapping[str, int] = {},
) -> Callable[[list[list[int]], int], list[Answer]]:
    """Load an exported model; return a function that decodes greedily, with tokens and seconds.

    Args:
        keys: Precision of keys and values.
        num_sequences: Prompts decoded together.
        lookup: Options of prompt lookup, if any.
    """
    import numpy as np
    import openvino
    import openvino_genai

    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.dynamic_split_fuse = False
    scheduler.max_num_batched_tokens = 1 << 16
    scheduler.max_num_seqs = num_sequences
    options = {
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": keys,
        "INFERENCE_NUM_THREADS": threads,
    }
    if lookup:
        options["prompt_lookup"] = True
    pipeline = openvino_genai.ContinuousBatchingPipeline(path, scheduler, "CPU", options)

    def decode(prompts: list[list[int]], max_new_tokens: int) -> list[Answer]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.stop_token_ids = (
            max_new_tokens,
            False,
            {*eos},
        )
        for name, value in lookup.items():
            setattr(config, name, value)
        begin = time.perf_counter()
        answers: list[Answer] = [{"tokens": [], "times": []} for _ in prompts]
        handles = [
            pipeline.add_request(number, openvino.Tensor(np.array([prompt])), config)
            for number, prompt in enumerate(prompts)
        ]
        while pipeline.has_non_finished_requests():
            pipeline.step()
            now = time.perf_counter() - begin
            for handle, answer in zip(handles, answers, strict=True):
                if handle.can_read():
                    [output] = handle.read().values()
                    answer["tokens"] += output.generated_ids
                    answer["times"].append(now)
        return answers

    return decode


def say(value: Any) -> None:
    """Print a value as a line."""
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    decode = load(**json.loads(sys.argv[1]))
    say("ready")
    for line in sys.stdin:
        request = json.loads(line)
        say(decode(request["prompts"], request["max_new_tokens"]))
