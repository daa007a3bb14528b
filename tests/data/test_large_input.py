"""Memory grows neither with the input nor with the results: two gigabytes are read like two megabytes."""

import os
import sys

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.job.conftest import ROOT, ran

MODELS = ROOT / ".models" / "tiny-random"
MIB = 1 << 20

READ_IT_ALL = """
import sys
from pathlib import Path
from specextend.core import DocumentKey
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.commits import CommitWriter
from specextend.data.source import open_source
from specextend.data.storage import resolve

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(dict(line.split(":") for line in lines)["VmHWM"].split()[0]) >> 10

before = peak()
output = resolve(sys.argv[2])
source = open_source(InputOptions(path=sys.argv[1], text_column="a.text", passthrough=("a.text",)))
assert sum(len(row.text) for row in source.scan()) >= int(sys.argv[3])
keys = [DocumentKey(0, row) for row in range(source.num_rows)]
for key in keys[::40]:
    assert source.read(key).text.startswith(f"{key.row:09d}")
CommitWriter(output, "0000000a").commit([{**key._asdict(), "doc_id": "x"} for key in keys])
assert finalize(source, output).done == len(keys)
print(peak() - before)
"""

READ_ONE_LONG_DOCUMENT = """
import sys
from pathlib import Path
from specextend.cluster.workload import make_plan
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.prompts import PromptOptions
from specextend.data.prompts import Prompts
from specextend.data.source import open_source
from specextend.requests.tasks import Task
from specextend.models.causal_lm import load_tokenizer

path, model = sys.argv[1:]
decoding = {"mode": "autoregressive", "max_new_tokens": 100}
values = {"input": {"path": path}, "output": {"path": "x"}, "target": {"model": model}, "decoding": decoding}
config = RunConfig.from_values(values)
source = open_source(config.input)
prompts = Prompts(load_tokenizer(model), PromptOptions(), 2048)
Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
fields = lambda: dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
peak = lambda: int(fields()["VmHWM"].split()[0]) >> 10
before = peak()
key = DocumentKey(0, 0)
plan = make_plan(source, [Task("", config, prompts)], {key})
assert plan.estimates[key].num_prompt_tokens == 1948
planned = peak()
prompt = prompts.render(source.read(key).text, 100)
assert (len(prompt.token_ids), prompt.length_policy) == (1948, "middle")
assert prompt.num_dropped_tokens > 1 << 19
print(planned - before, peak() - before)
"""


WRITE_RESULTS = """
import random, sys
from pathlib import Path
import pyarrow as pa
import pyarrow.parquet as pq
from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.storage import resolve
from tests.properties.rows import done

folder, num_files, num_rows, size = Path(sys.argv[1]), 50, 1000, int(sys.argv[2])
(folder / "in").mkdir(parents=True)
for number in range(num_files):
    pq.write_table(pa.table({"text": ["x"] * num_rows}), folder / "in" / f"{number:02d}.parquet")
draw = random.Random(1)
keys = [DocumentKey(file, row) for file in range(num_files) for row in range(num_rows)]
draw.shuffle(keys)
writer = CommitWriter(resolve(str(folder / "out")), "0000000a")
for begin in range(0, len(keys), 2000):
    writer.commit([done(key, draw.randbytes(size // 2).hex()) for key in keys[begin : begin + 2000]])
"""

FINALIZE_RESULTS = """
import re, sys
from pathlib import Path
from specextend.data.finalize import finalize
from specextend.data.inputs import InputOptions
from specextend.data.source import open_source
from specextend.data.storage import resolve

from specextend.report import RunFigures, write_report

folder = Path(sys.argv[1])
source, output, figures = open_source(InputOptions(path=str(folder / "in"))), resolve(str(folder / "out")), RunFigures()
counts = finalize(source, output, observe=figures.add)
write_report(output.path, output, figures=figures)
[peak] = re.findall(r"VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())
print(counts.done, int(peak) >> 10)
"""


def write_two_gigabytes(path, group_rows):
    """2,100 documents of a megabyte, stored as they are: the file is as large as its text."""
    filling = os.urandom(MIB // 2).hex()
    with pq.ParquetWriter(
        path, pa.schema([("a.text", "large_string")]), compression="none", use_dictionary=False
    ) as writer:
        for begin in range(0, 2100, group_rows):
            text = [f"{row:09d} {filling}" for row in range(begin, min(begin + group_rows, 2100))]
            writer.write_table(pa.table({"a.text": pa.array(text, "large_string")}), row_group_size=group_rows)


@pytest.mark.slow
def test_two_gigabytes_are_read_in_bounded_memory(tmp_path):
    """Audit, plan, documents and summaries with the text passed through."""
    path = tmp_path / "in" / "a.parquet"
    path.parent.mkdir()
    write_two_gigabytes(path, group_rows=8)
    assert path.stat().st_size > 2 << 30
    [peak] = measured(READ_IT_ALL, path, tmp_path / "out", 2 << 30)
    for large in tmp_path.rglob("*.parquet"):
        large.unlink()
    assert peak < 400, "MiB over what the libraries take"


@pytest.mark.slow
def test_one_long_document_is_planned_and_rendered_in_bounded_memory(tmp_path):
    """Tokenizing takes a hundred times the memory of the text: a document of a gigabyte would end the driver, and then
    each worker that gets it.
    """
    path = tmp_path / "a.parquet"
    text = "".join(f"word {number} of a text\n" for number in range(200_000))
    pq.write_table(pa.table({"text": [text]}), path)
    assert len(text) > 4 * MIB
    planned, rendered = measured(READ_ONE_LONG_DOCUMENT, path, MODELS / "target")
    assert planned < 100, "MiB; tokenized whole it would be 800"
    assert rendered < 200, "MiB; the text itself is held three times"


def test_text_that_is_stored_once_and_repeated_is_read_in_bounded_memory(tmp_path):
    """400 MB of text in a file of some hundred kilobytes: its size says nothing about what reading it takes.

    The column has a dot in its name, as if it were inside another one.
    """
    texts = [f"{row:09d} {os.urandom(50_000).hex()}" for row in range(0, 4300, 860)]
    path = tmp_path / "a.parquet"
    repeated = pa.array([texts[row // 860] for row in range(4300)])
    pq.write_table(pa.table({"a.text": repeated}), path)
    assert path.stat().st_size < 2 * MIB
    [peak] = measured(READ_IT_ALL.replace("key.row:", "key.row // 860 * 860:"), path, tmp_path / "out", 400 * MIB)
    assert peak < 300, "MiB over what the libraries take"


@pytest.mark.slow
def test_memory_at_the_end_of_a_run_does_not_grow_with_its_results(tmp_path):
    """400 MB of summaries, then 1.2 GB; ten million documents have many times more than a driver can hold."""
    peaks = []
    for size in (8_000, 24_000):
        assert measured(WRITE_RESULTS, tmp_path / str(size), size) == []
        done, peak_mib = measured(FINALIZE_RESULTS, tmp_path / str(size))
        assert done == 50_000
        peaks.append(peak_mib)
    assert peaks[1] < peaks[0] + 400, peaks


def measured(script, *arguments):
    """The numbers that a script prints in a process of its own."""
    return [int(number) for number in ran(sys.executable, "-c", script, *map(str, arguments)).exits(0).stdout.split()]
