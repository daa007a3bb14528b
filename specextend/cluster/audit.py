"""Audit of a run: decodes some finished rows again in this process, with and without a draft.

It compares texts, and measures the speedup. Both sides take turns, because the speed of a machine
drifts.
"""

import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from specextend.cluster.checks import CheckedRun, check_run
from specextend.config import RunConfig
from specextend.core import Completion, DocumentKey, Values
from specextend.data.fingerprint import check_one_task, differences, read_manifest
from specextend.data.inputs import DocumentError
from specextend.data.rows import Row
from specextend.data.storage import resolve
from specextend.models.causal_lm import target_device
from specextend.models.loading import load_engine, usable_bytes, with_batch_size
from specextend.report.result_rows import find_rows
from specextend.requests.rounds import DecodedRow, Summary
from specextend.stats import DecodingStats, spread
from specextend.summarizer import RowDecoder

NEAR_TIES = {"float32": 1e-3, "float16": 0.0625, "bfloat16": 0.5}
"""Lead in logits that rounding can overturn (`docs/dev/log.md`)."""
TURNS = 4
"""Repetitions per side, even: each side begins equally often."""
_Turn = dict[bool, list[DecodedRow]]
"""The sample with drafts (True) and without (False)."""
_LENGTHS = ("num_prompt_tokens", "num_output_tokens", "num_requests")
_COLUMNS = ("doc_id", "summary", "reasoning", "part_summaries", *_LENGTHS, "max_new_tokens")


def audit(output: str, num_rows: int, seed: int) -> Values:
    """Decode rows again and return the `audit` section of the report. Raises ValueError."""
    checked = _check(output)
    if not checked.source.num_rows:
        raise ValueError(f"{output} has no rows to compare")
    found = _draw(checked, num_rows, seed)
    if not found:
        raise ValueError(
            f"{output} has no finished row in the sample; give more --rows, or finish the run"
        )
    rows = [row for row, _ in found]
    stored = [
        _texts(each["part_summaries"], each["reasoning"], each["summary"]) for _, each in found
    ]
    config = _in_batches(checked, [each for _, each in found])
    engine = load_engine(config)
    decoder = RowDecoder(config, engine)
    _take_turn(decoder, rows[:1], 0)  # the first request takes longer
    turns = [_take_turn(decoder, rows, number) for number in range(TURNS)]
    plain = turns[0][False]
    unequal = [
        place for place, document in enumerate(plain) if _texts_of(document) != stored[place]
    ]
    again = decoder.decode([rows[place] for place in unequal], drafts=False, keeps_leads=True)
    # compiled layers always round alike, so no difference is due to rounding
    near_tie = -1.0 if engine.target.runs_in_one_call else NEAR_TIES[config.target.dtype]
    not_equal = [
        {
            "doc_id": rows[place].doc_id,
            **_judge(stored[place], document, near_tie, engine.tokenizer),
        }
        for place, document in zip(unequal, again, strict=True)
    ]
    outcomes = Counter(each["outcome"] for each in not_equal)
    return {
        "documents": len(rows),
        "equal": len(rows) - len(not_equal),
        "near_ties": outcomes["near tie"],
        "different": outcomes["different"],
        "failed": outcomes["failed"],
        "not_equal": not_equal,
        "batch_size": min(len(rows), config.decoding.batch_size),
        "speedup": _speedup(turns),
    }


def _take_turn(decoder: RowDecoder, rows: list[Row], number: int) -> _Turn:
    sides = (True, False) if number % 2 == 0 else (False, True)
    return {drafts: decoder.decode(rows, drafts=drafts) for drafts in sides}


def _check(output: str) -> CheckedRun:
    recorded = read_manifest(resolve(output))
    if recorded is None:
        raise ValueError(f"{output} holds no run (_run/manifest.json is missing)")
    values = recorded["config"]
    check_one_task(recorded, f"{output}: an audit")
    checked = check_run(
        RunConfig.from_values(values | {"output": values["output"] | {"path": output}})
    )
    if checked.config.decoding.mode == "autoregressive":
        raise ValueError(f"{output} was decoded without a draft: nothing to compare")
    if lines := differences(recorded, checked.manifest):
        raise ValueError(
            f"{output} cannot be audited: its input or a model has changed since ({lines[0]})"
        )
    return checked


def _draw(checked: CheckedRun, num_rows: int, seed: int) -> list[tuple[Row, Values]]:
    source = checked.source
    drawn = set(random.Random(seed).sample(range(source.num_rows), min(num_rows, source.num_rows)))
    keys = (
        DocumentKey(file.number, row) for file in source.files for row in source.rows(file.number)
    )
    rows: dict[str, Row] = {}
    for place, key in enumerate(keys):
        if place in drawn:
            with suppress(DocumentError):  # the run has an error row for it
                row = source.read(key)
                rows[row.doc_id] = row
    found = find_rows(checked.output, [*rows], _COLUMNS)
    return [
        (replace(rows[each["doc_id"]], max_new_tokens=each["max_new_tokens"]), each)
        for each in found
    ]


def _in_batches(checked: CheckedRun, stored: list[Values]) -> RunConfig:
    """Use the run's batch size, with room for all of its texts."""
    most = max(each["max_new_tokens"] for each in stored)
    decoding = replace(checked.config.decoding, max_new_tokens=most)
    config = checked.config.model_copy(update={"decoding": decoding})
    target_device(config.target, config.job.device)  # raises without such a device
    lengths = [
        (each["num_prompt_tokens"] + each["num_output_tokens"]) // each["num_requests"]
        for each in stored
    ]
    num_tokens = sum(lengths) // len(lengths), max(lengths)
    return with_batch_size(config, checked.facts, usable_bytes(config), num_tokens)


def _texts(parts: Sequence[Values] | None, reasoning: str | None, text: str) -> list[str]:
    return [*(part["text"] for part in parts or ()), reasoning or "", text]


def _texts_of(document: DecodedRow) -> list[str] | None:
    summary = document.state
    return (
        _texts(summary.part_rows, summary.reasoning, summary.completion.text)
        if isinstance(summary, Summary)
        else None
    )


def _judge(stored: list[str], document: DecodedRow, near_tie: float, tokenizer: Any) -> Values:
    """Decide whether a difference can be rounding, by the leads of plain decoding's tokens."""
    texts = _texts_of(document)
    if texts is None:
        return {"outcome": "failed", "gap": None, "error": str(document.state)}
    gap, num_parts = 0.0, len(texts) - 2  # 0: the target has chosen either text now
    unequal = [number for number, text in enumerate(texts) if text != stored[number]]
    # a merge after a different part, and an answer after a different thought, say nothing
    for number in [number for number in unequal if number < num_parts] or unequal[:1]:
        completion = document.completions[number if number < num_parts else -1]
        begin = completion.text.rfind(texts[number])
        other = completion.text[:begin] + stored[number]
        gap = max(
            gap, _lead_at(completion, other, tokenizer) if begin >= 0 else max(completion.leads)
        )
    return {"outcome": "near tie" if gap <= near_tie else "different", "gap": gap, "error": None}


def _lead_at(completion: Completion, other: str, tokenizer: Any) -> float:
    """Return the lead of the first token that differs from `other`, by default of the last."""
    for place, lead in enumerate(completion.leads, 1):
        begin = completion.token_ids[:place]
        text = tokenizer.decode(begin, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not other.startswith(text.rstrip("\ufffd")):
            return lead
    return completion.leads[-1]


def _speedup(turns: Sequence[_Turn]) -> Values | None:
    ratios = [ratio for turn in turns if (ratio := _ratios(turn))]
    if not ratios:
        return None
    return {name: spread([each[name] for each in ratios]) for name in ratios[0]}


def _ratios(turn: _Turn) -> dict[str, float] | None:
    with_draft = DecodingStats()
    without = DecodingStats()
    for ours, theirs in zip(turn[True], turn[False], strict=True):
        if isinstance(ours.state, Summary) and isinstance(theirs.state, Summary):
            with_draft.add(ours.state.completion.stats)
            without.add(theirs.state.completion.stats)
    if not with_draft.num_spec_steps:
        return None
    both = (without, with_draft)
    decode = [(each.draft_prefill_s + each.step_s) / each.num_output_tokens for each in both]
    prefill = [each.prefill_s / each.num_output_tokens for each in both]
    return {
        "decode": decode[0] / decode[1],
        "end_to_end": (decode[0] + prefill[0]) / (decode[1] + prefill[1]),
    }
