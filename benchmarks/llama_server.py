"""llama.cpp's server as a process of its own, which prints its address and ends when its standard
input does.

Beside torch in one process both are slower by a third: each has a pool of OpenMP threads of its
own.

    python benchmarks/llama_server.py '{"path": "target.gguf", "num_tokens": 8192, "cache": "F16",
    "threads": 2}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def serve(
    path: str, num_tokens: int, cache: str, threads: int, drafts: Mapping[str, Any] = {}
) -> Any:
    """Load a GGUF file with room for `num_tokens` tokens into a server with one slot, on loopback
    only.

    drafts: a `kind` of n-gram drafts (`simple`, `map_k`, `mod`) with its options; none without it.
    Raises RuntimeError if llama.cpp refuses the file.
    """
    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel = num_tokens, 1
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_AUTO
    params.cache_type_k = params.cache_type_v = getattr(xllamacpp.ggml_type, f"GGML_TYPE_{cache}")
    params.cache_prompt, params.cache_ram_mib, params.fit_params = False, 0, False
    params.hostnames, params.port, params.ui = ["127.0.0.1"], 0, False
    params.verbosity = -1
    if drafts:
        kinds, speculative = xllamacpp.common_speculative_type, params.speculative
        speculative.types = [
            getattr(kinds, f"COMMON_SPECULATIVE_TYPE_NGRAM_{drafts['kind'].upper()}")
        ]
        for name, value in drafts["options"].items():
            setattr(getattr(speculative, f"ngram_{drafts['kind']}"), name, value)
    return xllamacpp.Server(params)


if __name__ == "__main__":
    server = serve(**json.loads(sys.argv[1]))
    sys.stdout.write(f"{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()
