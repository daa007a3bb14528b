"""llama.cpp's server in a separate process, because thread pools of torch would slow down both.

Prints its address, and ends with its standard input.

    python benchmarks/llama_server.py
        '{"path": "target.gguf", "num_tokens": 8192, "cache": "F16", "threads": 2}'
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any


def serve(
    path: str, num_tokens: int, cache: str, threads: int, drafts: Mapping[str, Any] = {}
) -> Any:
    """Load a GGUF file into a server with a single slot, on loopback only.

    Args:
        num_tokens: Size of the context.
        drafts: A `kind` of n-gram drafts (`simple`, `map_k`, `mod`) with its options.

    Raises:
        RuntimeError: llama.cpp refuses the file.
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
