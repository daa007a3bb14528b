"""A review by people. Begin at `draw_sample` and `read_review`."""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from specextend.core import Values, one_line
from specextend.data.answers import answer_fields
from specextend.data.database import Database
from specextend.data.fingerprint import output_columns, read_manifest
from specextend.data.parquet import plain_text
from specextend.data.results import redone_runs
from specextend.data.storage import Location, read_bytes
from specextend.report.export import (
    EXECUTED,
    Answers,
    Form,
    check_place,
    narrowed,
    newest_answers,
    read_answers,
    write_answers,
)
from specextend.report.gold import wilson

VERDICTS = {"good": True, "yes": True, "1": True, "1.0": True} | dict.fromkeys(
    ("bad", "no", "0", "0.0"), False
)
"""Verdicts in lower case. A data frame with empty cells writes 1 as 1.0."""
LEAST = 2
"""Fewest rows from a stratum, unless it is smaller."""
_OURS = ("verdict", "stratum", "weight", "run")
_READ = ("doc_id", "verdict", "stratum", "run")
_WHOLE = "all"
"""Stratum of a sample without strata."""
_SHOWN = ("quality_flags", "sources", "evidence", "figures")
_ANSWERS = pa.schema([("doc_id", "string"), ("quality_flags", pa.list_(pa.string()))])
_STRATA = """
    CREATE TABLE strata AS
    WITH flagged AS (SELECT rowid AS place, unnest(flags) AS flag FROM answers),
        counted AS (SELECT flag, count(*) AS answers FROM flagged GROUP BY flag),
        rarest AS (
            SELECT place, first(flag ORDER BY answers, flag) AS flag
            FROM flagged JOIN counted USING (flag) GROUP BY place
        ),
        known AS (
            SELECT answers.rowid AS place, doc_id, flags, if(?, coalesce(flag, 'no flag'), ?)
                AS stratum
            FROM answers LEFT JOIN rarest ON answers.rowid = place
        )
    SELECT *, row_number() OVER (PARTITION BY stratum ORDER BY md5('review:' || doc_id), doc_id)
        AS draw
    FROM known
"""
"""Answers by their rarest flag. The prefix makes the draw independent of `input.sample`."""
_DRAWN = """
    SELECT place, stratum, weight FROM strata JOIN given USING (stratum) WHERE draw <= num_rows
    ORDER BY place
"""
_JUDGED = rf"""
    CREATE TABLE judged AS
    SELECT given.doc_id AS written, is_good, coalesce(own.doc_id, quoted.doc_id) IS NULL AS is_new,
        if(bool_and(own.doc_id IS NOT NULL) OVER (), own.doc_id, quoted.doc_id) AS doc_id
    FROM given LEFT JOIN strata AS own ON own.doc_id = given.doc_id
        LEFT JOIN strata AS quoted
            ON regexp_replace(quoted.doc_id, '{EXECUTED}', '''\1') = given.doc_id
"""
"""Answers by their ids, or else by their ids after `--spreadsheet-safe`."""
_CELLS = """
    WITH each AS (SELECT flags, stratum, is_good FROM strata LEFT JOIN judged USING (doc_id)),
        parts AS (
            SELECT 'good' AS part, stratum, is_good FROM each
            UNION ALL
            SELECT if(len(flags) > 0, 'flagged', 'unflagged'), stratum, is_good FROM each
            UNION ALL SELECT 'flag:' || unnest(flags), stratum, is_good FROM each
        )
    SELECT part, count(*) AS answers, count(is_good) AS reviewed,
        count(*) FILTER (is_good) AS good
    FROM parts GROUP BY part, stratum ORDER BY part, stratum
"""


class Stratum(NamedTuple):
    """Counts of a group from which rows were drawn at random."""

    rows: int
    drawn: int
    hits: int


def draw_sample(
    output: Location,
    to: Location,
    form: Form,
    num_rows: int,
    *,
    by_flags: bool = False,
    replaces: bool = False,
) -> tuple[int, int]:
    """Write a sample of answers with an empty column `verdict`. It is the same for the same run.

    Args:
        by_flags: True to draw some answers with each flag and some without.

    Returns:
        Numbers of drawn and of all answers.

    Raises:
        ValueError: The run has not ended, or does not fit the sample.
    """
    check_place([output], to, replaces)
    found = newest_answers([output])
    schema = narrowed(found.schema, form.columns or _shown(output, found.schema))
    if taken := [name for name in _OURS if name in schema.names]:
        raise ValueError(
            f"--sample: the answers have a column {taken[0]}, which the sample needs; name others "
            "by --columns"
        )
    if not found.counts.done:
        raise ValueError(f"{output.path} has no answers to draw from")
    run = _state(output, found)
    database = _by_strata(found, by_flags)
    sizes = {
        row["stratum"]: row["answers"]
        for row in database.select(
            "SELECT stratum, count(*) AS answers FROM strata GROUP BY ALL ORDER BY ALL"
        )
    }
    drawn = allocate(sizes, num_rows)
    weights = [sizes[name] / count for name, count in drawn.items()]
    given = pa.table([[*drawn], [*drawn.values()], weights], ["stratum", "num_rows", "weight"])
    rows = database.add(given, _DRAWN)
    texts = pa.concat_tables(
        [schema.empty_table(), *_rows_of(found, schema, [row["place"] for row in rows])]
    )
    columns = {
        "verdict": pa.nulls(len(rows), pa.string()),
        **dict(zip(texts.column_names, texts.columns, strict=True)),
        "stratum": pa.array([row["stratum"] for row in rows], pa.string()),
        "weight": pa.array([row["weight"] for row in rows], pa.float64()),
        "run": pa.array([run] * len(rows), pa.string()),
    }
    sample = pa.table(columns)
    write_answers(to, form, sample.schema, [sample])
    return len(rows), found.counts.done


def allocate(sizes: Mapping[str, int], num_rows: int) -> dict[str, int]:
    """Divide a sample by the square roots of the sizes. Raises ValueError if it is too small."""
    taken = {name: min(LEAST, size) for name, size in sizes.items()}
    if (least := sum(taken.values())) > num_rows:
        raise ValueError(
            f"--sample {num_rows} is too small for {len(sizes)} kinds of answers by flags; take "
            f"{least} or more"
        )
    for _ in range(min(num_rows, sum(sizes.values())) - least):
        _, name = max(
            (math.sqrt(size) / taken[name], name)
            for name, size in sizes.items()
            if taken[name] < size
        )
        taken[name] += 1
    return taken


def read_review(output: Location, file: Location) -> Values:
    """Read the verdicts of people on a sample of `draw_sample` (CSV or Parquet).

    Returns:
        Counts, and shares of good answers (`good`, `unflagged`) and of bad answers (`flagged`,
        `flags`). The share of all good answers is None while a stratum has no verdict.

    Raises:
        ValueError: The file is not a sample of the present answers, or has an unknown verdict.
    """
    found = newest_answers([output])
    verdicts, by_flags = _read_verdicts(file, _state(output, found))
    database = _by_strata(found, by_flags)
    database.add(verdicts, _JUDGED)
    for row in database.select(
        "SELECT written FROM judged WHERE doc_id IS NULL ORDER BY is_new DESC LIMIT 1"
    ):
        raise ValueError(f"{file.path}: the run has no answer to {row['written']!r}")
    for row in database.select(
        "SELECT doc_id FROM judged GROUP BY doc_id HAVING count(*) > 1 LIMIT 1"
    ):
        raise ValueError(f"{file.path} has {row['doc_id']!r} twice; leave one row")
    parts: defaultdict[str, list[Stratum]] = defaultdict(list)
    for part, answers, reviewed, good in map(dict.values, database.select(_CELLS)):
        hits = reviewed - good if part.startswith("flag") else good
        parts[part].append(Stratum(answers, reviewed, hits))
    shares = {part: _share(strata) for part, strata in parts.items()}
    reviewed = shares["good"]["reviewed"] if shares else 0
    if not reviewed:
        raise ValueError(f"{file.path} has no verdict yet: write good or bad into its column")
    if shares["good"]["answers"] < found.counts.done:  # a stratum without a verdict may be all bad
        shares["good"] |= {"share": None, "interval": None}
    flags = {part[5:]: share for part, share in shares.items() if part.startswith("flag:")}
    return {
        "file": file.path,
        "rows": len(verdicts),
        "without_verdict": len(verdicts) - reviewed,
        "answers": found.counts.done,
        **{part: shares[part] for part in ("good", "unflagged", "flagged") if part in shares},
        "flags": flags,
    }


def _share(strata: list[Stratum]) -> Values:
    reviewed = sum(each.drawn for each in strata)
    share, interval = stratified(strata) if reviewed else (None, None)
    answers = sum(each.rows for each in strata if each.drawn)
    return {"answers": answers, "reviewed": reviewed, "share": share, "interval": interval}


def stratified(strata: Iterable[Stratum]) -> tuple[float, list[float]]:
    """Estimate the share of hits in all strata with a drawn row.

    Returns:
        The share, and its interval: Wilson's of each stratum, corrected for small strata, joined
        by MOVER (Zou, Huang and Zhang 2009).
    """
    known = [each for each in strata if each.drawn]
    total = sum(each.rows for each in known)
    share = below = above = 0.0
    for rows, drawn, hits in known:
        size = drawn * (rows - 1) / (rows - drawn) if rows > drawn else math.inf
        low, high = wilson(hits / drawn, size)
        share += rows * hits / drawn / total
        below += (rows / total * (hits / drawn - low)) ** 2
        above += (rows / total * (high - hits / drawn)) ** 2
    return share, [max(0.0, share - math.sqrt(below)), min(1.0, share + math.sqrt(above))]


def _shown(output: Location, schema: pa.Schema) -> list[str]:
    columns = output_columns(output)
    names = ["doc_id"]
    for text, answers in (columns[:2], *(each[1:] for each in columns.others)):
        names += [text, *(field.name for field in answer_fields(answers))]
    return [name for name in (*names, *_SHOWN) if name in schema.names]


def _state(output: Location, found: Answers) -> str:
    """Return an identifier of the present answers."""
    manifests = [read_manifest(run) for run in (output, *redone_runs(output)[0])]
    if None in manifests:
        raise ValueError(f"{output.path} has no manifest, so no review can be told to be of it")
    names = "+".join(manifest["fingerprint"][:16] for manifest in manifests if manifest)
    return f"{names}:{found.counts.done}"


def _by_strata(found: Answers, by_flags: bool) -> Database:
    database = Database()
    database.select("CREATE TABLE answers (doc_id TEXT, flags TEXT[])")
    for file, mask in found.files:
        for table in read_answers(file, _ANSWERS, mask):
            database.add(
                table, "INSERT INTO answers SELECT doc_id, list_distinct(quality_flags) FROM given"
            )
    database.select(_STRATA, by_flags, _WHOLE)
    return database


def _rows_of(found: Answers, schema: pa.Schema, places: list[int]) -> Iterator[pa.Table]:
    """Read answers by their places among all, in order."""
    begin = 0
    for file, mask in found.files:
        rows = np.flatnonzero(mask)
        own = np.zeros_like(mask)
        own[rows[[place - begin for place in places if begin <= place < begin + len(rows)]]] = True
        if own.any():
            yield from read_answers(file, schema, own)
        begin += len(rows)


def _read_verdicts(file: Location, run: str) -> tuple[pa.Table, bool]:
    """Read ids with verdicts (null if empty); True if drawn by flags."""
    content = read_bytes(file)
    if content is None:
        raise ValueError(f"--reviewed: there is no {file.path}")
    try:
        table = _parsed(content)
        ids, verdicts, strata, runs = (plain_text(table[name]).to_pylist() for name in _READ)
    except (pa.ArrowException, KeyError) as error:
        raise ValueError(
            f"{file.path} is no sample of `export --sample`, as CSV in UTF-8 or Parquet "
            f"({one_line(error)})"
        ) from error
    if {*runs} - {run}:
        raise ValueError(
            f"{file.path} is a sample of another run, or was drawn before rows of this one were "
            "done again; draw another with `export --sample`"
        )
    judged = []
    for doc_id, verdict in zip(ids, verdicts, strict=True):
        said = (verdict or "").strip().casefold()
        if said and said not in VERDICTS:
            raise ValueError(
                f"{file.path}: the verdict on {doc_id!r} is {verdict!r}; write good or bad, yes "
                "or no, 1 or 0"
            )
        judged.append(VERDICTS.get(said))
    types = [pa.string(), pa.bool_()]
    table = pa.table([*map(pa.array, (ids, judged), types)], ["doc_id", "is_good"])
    return table, {*strata} != {_WHOLE}


def _parsed(content: bytes) -> pa.Table:
    """Parse Parquet, or CSV with the delimiters of any spreadsheet."""
    if content[:4] == b"PAR1":
        return pq.read_table(pa.BufferReader(content), columns=[*_READ]).select([*_READ])
    header = content.partition(b"\n")[0]
    delimiter = max(b",", b";", b"\t", key=header.count).decode()
    table = pa_csv.read_csv(
        pa.BufferReader(content),
        read_options=pa_csv.ReadOptions(block_size=max(len(content), 1)),  # a row may be large
        parse_options=pa_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(
            include_columns=[*_READ],
            column_types=dict.fromkeys(_READ, pa.string()),
            null_values=[""],
            strings_can_be_null=True,
        ),
    )
    is_empty = pc.and_(pc.is_null(table["doc_id"]), pc.is_null(table["verdict"]))
    return table.filter(pc.invert(is_empty))  # spreadsheets write rows of delimiters
