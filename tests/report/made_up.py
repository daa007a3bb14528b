"""A run of two nights: the first driver is killed, the second one ends the run. Each event has a time that we chose."""

from dataclasses import dataclass

from specextend.cluster.lock import LockHolder
from specextend.cluster.messages import WorkerInfo
from specextend.cluster.records import StartRecord
from specextend.config import RunConfig
from specextend.core import Completion
from specextend.data.commits import CommitWriter
from specextend.data.fingerprint import VERSION, fingerprint, write_manifest
from specextend.data.parquet import write_table
from specextend.data.prompts import Prompt
from specextend.data.quality import QualityOptions, assess
from specextend.data.schema import decoded_columns
from specextend.data.storage import resolve
from specextend.stats import DecodingStats

FIRST = "0000000a"
SECOND = "0000000b"
NIGHT_S = 1_800_000_000.0
"""When the first driver began, in seconds since the epoch."""
NEXT_NIGHT_S = NIGHT_S + 86_400.0
KILLED_S = 118.0
"""Last heartbeat of the first driver, after it began."""
NUM_DOCUMENTS = 300
PRICE = 2.5
HOSTILE = '<img src="https://evil.example/x.png" onerror="document.title=\'owned\'"><script>alert(1)</script>'


@dataclass
class SetClock:
    """Seconds since the epoch, as somebody set them."""

    now: float = NIGHT_S

    def __call__(self):
        return self.now


def config_of(output, **report):
    return RunConfig.from_values(
        {
            "input": {"path": "/in"},
            "output": {"path": output},
            "target": {"model": "/models/target"},
            "decoding": {"mode": "autoregressive"},
            "job": {"workers": 2, "gpus_per_worker": 0.5},
            "report": report,
        }
    )


LIMITS = {
    "read_bytes_per_s": 4e12,
    "flop_per_s": 8e14,
    "weight_bytes": 16_000_000_000,
    "kv_bytes_per_token": 131_072,
    "layer_parameters": 7_000_000_000,
    "head_parameters": 500_000_000,
    "attention_flop_per_pair": 524_288,
}
"""Of every worker but the second, which measured none."""


def info(pid):
    return WorkerInfo("node", "host", pid, "H200", (f"GPU {pid}",), None if pid == 2 else LIMITS)


def first_night(output, config):
    """Two workers, one of which dies and is replaced; then the driver is killed, and its record has no end."""
    clock = SetClock()
    record = StartRecord(output, FIRST, config, clock=clock)
    record.write()
    for pid in (1, 2):
        start_worker(record, clock, pid, pid, NIGHT_S, NIGHT_S + 10 * pid)
    clock.now = NIGHT_S + 60
    record.note("worker-2", "gone", reason="its process ended")
    start_worker(record, clock, 3, 2, NIGHT_S + 60, NIGHT_S + 80)
    record.write()


def start_worker(record, clock, pid, seat, asked, ready):
    """Note that a worker was asked for, had a process two seconds later, and was ready."""
    clock.now = asked
    record.worker_asked(f"worker-{pid}", seat)
    clock.now = asked + 2
    record.note(f"worker-{pid}", "begun")
    clock.now = ready
    record.note(f"worker-{pid}", "ready", **info(pid)._asdict())


def second_night(output, config):
    """Two workers, for a third of which there is no room; the run ends, an error row among its rows."""
    clock = SetClock(NEXT_NIGHT_S)
    holder = LockHolder(FIRST, "host", 1, NIGHT_S + KILLED_S)
    record = StartRecord(output, SECOND, config, took_over=holder, clock=clock)
    for seat in (1, 2):
        start_worker(record, clock, seat + 10, seat, NEXT_NIGHT_S + 3, NEXT_NIGHT_S + 20)
    record.worker_asked("worker-13", 3)
    clock.now = NEXT_NIGHT_S + 420
    record.workers_released()
    clock.now = NEXT_NIGHT_S + 430
    record.end(0)


def some_stats(row):
    """Counts and times that differ from row to row."""
    steps = 5 + row % 50
    prefill = 0.1 + row % 40 / 40
    return DecodingStats(
        num_prompt_tokens=int(4000 * prefill),
        num_cached_tokens=100 * (row % 2),
        num_output_tokens=3 * steps + row % 8,
        num_spec_steps=steps,
        num_plain_steps=1 + row % 8,
        num_forwards=steps / 2,
        num_draft_tokens=8 * steps,
        num_network_steps=steps - 1,
        num_first_accepted=steps - 3,
        num_accepted_tokens=2 * (steps - 1),
        acceptance_histogram=[1, 0, steps - 1],
        num_retrievals=1 + row % 4,
        retrieval_coverage_sum=0.7,
        retrieval_churn_sum=0.1 * (row % 4),
        num_fallbacks=row % 2,
        num_memory_retries=int(row == 7),
        prefill_s=prefill,
        draft_prefill_s=0.1,
        draft_s=0.1,
        verify_s=0.11,
        retrieval_s=0.1,
        other_s=0.01,
        ttft_s=prefill + 0.1,
        decode_s=0.32,
    )


def done_row(row, stats, worker, started_at, doc_id=""):
    """A document done; one in four is cut, one in ten repeats itself, and one in twenty is empty."""
    tokens = [1, 2] * 20 if row % 10 == 1 else [*range(40)]
    text = "" if row % 20 == 2 else f"text {row}. No."
    completion = Completion(str(row), tokens, text, "stop" if row % 4 else "length", stats)
    quality = assess(completion, "Another text. A text.", 0, None, QualityOptions(), "", None, range(0))
    return decoded_columns(completion, Prompt([1], 0 if row % 3 else 400, "middle"), quality) | {
        "file": 0,
        "row": row,
        "doc_id": doc_id or f"doc-{row:04d}",
        "content_sha256": "00",
        "queue_s": row % 3 / 10,
        "started_at": int(1000 * started_at),
        "worker": worker,
        "attempts": 1 if row % 10 else 2,
        "num_requests": 1,
    }


def failed_row(row, error_class="PromptTooLong", doc_id=""):
    told = {"error_class": error_class, "message": "it is too long", "stage": "prompt", "retryable": False}
    return {"file": 0, "row": row, "doc_id": doc_id or f"doc-{row:04d}", **told, "attempts": 1}


def rows_of_worker(rows, worker, begin):
    """Documents one after the other, with a pause after each."""
    made = []
    for row in rows:
        stats = some_stats(row)
        made.append(done_row(row, stats, worker, begin))
        begin += stats.total_s + 0.1
    return made


def write_manifest_file(output, config, num_rows, digest="f" * 64):
    file = {"rows": num_rows, "size": 1, "footer_sha256": "0" * 64}
    values = config.model_dump(mode="json")
    identity = {"files": {"a.parquet": file}, "hashes": {"target": digest}, "config": {}}
    model = {"target": {"model": "/models/target", "commit": "c0ffee"}}
    manifest = {"version": VERSION, "fingerprint": fingerprint(identity), "identity": identity, "config": values}
    write_manifest(output, manifest | {"models": model})


def begin_run(folder, num_rows):
    """Write the manifest of a run in its folder."""
    output = resolve(str(folder))
    write_manifest_file(output, config_of(output.path), num_rows)
    return output


def write_part(folder, table):
    """Write the results of the first input file, as a run does."""
    write_table(resolve(f"{folder}/part-00000.parquet"), table)


def write_run(folder, **report):
    """Write the folder of the run; returns its path. report: options of the section `report`."""
    output = resolve(str(folder))
    config = config_of(str(folder), **report)
    write_manifest_file(output, config, NUM_DOCUMENTS)
    first_night(output, config)
    writer = CommitWriter(output, FIRST)
    early = rows_of_worker(range(60), "host:1", NIGHT_S + 12)
    writer.commit([*early[:40], failed_row(290), failed_row(291, "WorkerDied")])
    dying = rows_of_worker(range(60, 85), "host:2", NIGHT_S + 21)
    writer.commit([*dying, *early[40:], *rows_of_worker(range(85, 100), "host:3", NIGHT_S + 81)])
    writer.commit([failed_row(0), failed_row(292)])  # the first of which is done, and stays so
    second_night(output, config)
    writer = CommitWriter(output, SECOND)
    late = rows_of_worker(range(100, 250), "host:11", NEXT_NIGHT_S + 21)
    later = rows_of_worker(range(250, 292), "host:12", NEXT_NIGHT_S + 22)
    writer.commit([*late[:100], *later])
    hostile = failed_row(298, "<b>Bad</b>", HOSTILE) | {"message": HOSTILE}
    writer.commit([*late[100:], *(failed_row(row) for row in (*range(292, 298), 299)), hostile])
    slow = DecodingStats(num_prompt_tokens=9_000, num_output_tokens=5, ttft_s=20.0, decode_s=1.0, prefill_s=20.0)
    writer.commit([done_row(299, slow, "host:11", NEXT_NIGHT_S + 300, HOSTILE)])
    return str(folder)
