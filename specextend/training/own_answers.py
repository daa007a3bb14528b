"""The target's own answers, given in the engine with the run's sampling, and how many tokens a step a draft brings.

The answers lie in Parquet files of a folder, with the columns `number`, `prompt_token_ids` and `output_token_ids`.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.config import RunConfig
from specextend.core import Request, Values
from specextend.data.parquet import CHECKED, write_table
from specextend.data.storage import resolve
from specextend.decoding.decoding_options import DraftOptions
from specextend.document_requests import document_seed
from specextend.loading import load_engine
from specextend.stats import DecodingStats
from specextend.training.recording import Answer
from specextend.training.task import Show

ROWS = 32
"""Answers in a file; so many are lost at most if a training is killed."""
TOKENS = pa.list_(pa.int32())
SCHEMA = pa.schema([("number", pa.int64()), ("prompt_token_ids", TOKENS), ("output_token_ids", TOKENS)])


def read_answers(folder: Path) -> dict[int, Answer]:
    """Read all answers in a folder, by number."""
    tables = (pq.read_table(file, schema=SCHEMA, **CHECKED) for file in folder.glob("*.parquet"))
    rows = (row for table in tables for row in table.to_pylist())
    return {row["number"]: Answer(row["prompt_token_ids"], row["output_token_ids"]) for row in rows}


def add_answers(config: RunConfig, prompts: Mapping[int, list[int]], folder: Path, show: Show) -> None:
    """Let the target answer prompts, by number, and write the answers into the folder as they come."""
    rows: list[Values] = []
    try:
        for done, completion in enumerate(load_engine(config).generate(_requests(config, prompts)), start=1):
            number = int(completion.request_id)
            tokens = {"prompt_token_ids": prompts[number], "output_token_ids": completion.token_ids}
            rows.append({"number": number} | tokens)
            show("answers", done, len(prompts))
            if len(rows) == ROWS:
                _write(rows, folder)
                rows = []
    finally:
        _write(rows, folder)


def tokens_per_step(config: RunConfig, prompts: Mapping[int, list[int]], show: Show) -> float:
    """Measure the mean acceptance length over answers to prompts, with trees of one size in each step."""
    if config.tree.nodes == "auto":  # it follows the machine's speed
        config = config.model_copy(update={"tree": replace(config.tree, nodes=config.tree.most_nodes)})
    stats, found = DecodingStats(), 1.0
    for done, completion in enumerate(load_engine(config).generate(_requests(config, prompts)), start=1):
        stats.add(completion.stats)
        found = stats.mean_acceptance_length or 1.0
        show("evaluation", done, len(prompts), f", {found:.3f} tokens per step")
    return found


def with_draft(config: RunConfig, folder: Path | None) -> RunConfig:
    """Return a run's configuration with the draft in a folder; with n-gram drafts if there is none yet."""
    if folder is None:
        draft = DraftOptions(kind="ngram")
    else:
        draft = DraftOptions(kind="eagle", model=str(folder), ngram=config.draft is not None and config.draft.ngram)
    return config.model_copy(update={"draft": draft, "decoding": replace(config.decoding, mode="specextend")})


def _requests(config: RunConfig, prompts: Mapping[int, list[int]]) -> Iterator[Request]:
    """Yield requests with the run's limit, sampling and schema; each has a seed of its own."""
    for number, token_ids in prompts.items():
        yield Request(
            request_id=str(number),
            prompt_token_ids=token_ids,
            max_new_tokens=config.decoding.max_new_tokens,
            sampling=config.decoding.sampling(document_seed(config.decoding.seed, f"answer {number}")),
            schema=config.output.json_schema or "",
        )


def _write(rows: list[Values], folder: Path) -> None:
    """Write a file named for its first number, whole or not at all; none without rows."""
    if rows:
        write_table(resolve(str(folder / f"{rows[0]['number']:06}.parquet")), pa.Table.from_pylist(rows, SCHEMA))
