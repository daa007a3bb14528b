"""Gives an EAGLE head a reduced vocabulary: the token ids that are most frequent in some documents.

    python scripts/draft_vocabulary.py --head models/H --tokenizer .models/T --size 8192 --output models/R D.parquet ...

Every file counts alike, whatever its size. End-of-sequence and all other special tokens are kept.
"""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file, save_file

from specextend.drafters.eagle_config import VOCABULARY, WEIGHTS_FILE, load_eagle_config
from specextend.models import load_tokenizer


def main() -> None:
    """Count, choose, write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--head", type=Path, required=True, help="folder of the head to start from")
    parser.add_argument("--tokenizer", required=True, help="folder of the target")
    parser.add_argument("--size", type=int, required=True, help="token ids to keep")
    parser.add_argument("--output", type=Path, required=True, help="folder to write; may be the head's own")
    parser.add_argument("documents", nargs="+", type=Path, help="Parquet files with a column `text`")
    arguments = parser.parse_args()
    config = load_eagle_config(arguments.head)
    weights = load_file(arguments.head / WEIGHTS_FILE)
    tokenizer = load_tokenizer(arguments.tokenizer)
    shares = np.zeros(config.vocab_size)
    for path in arguments.documents:
        counts = np.zeros(config.vocab_size)
        for text in pq.read_table(path, columns=["text"])["text"].to_pylist():
            token_ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            counts += np.bincount(token_ids, minlength=config.vocab_size)
        shares += counts / counts.sum()
    shares[tokenizer.all_special_ids] = shares.max() + 1
    chosen = np.sort(np.argsort(-shares, kind="stable")[: arguments.size])
    weights[VOCABULARY] = torch.from_numpy(chosen)
    arguments.output.mkdir(parents=True, exist_ok=True)
    save_file(weights, arguments.output / WEIGHTS_FILE)
    dataclasses.replace(config, draft_vocab_size=len(chosen)).save(arguments.output)


if __name__ == "__main__":
    main()
