"""Storage on the real S3 protocol: moto's server on loopback, found and unlocked through the environment alone."""

import os
import pickle
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from specextend.cluster.checks import check_run
from specextend.cluster.driver import is_damaged_row
from specextend.cluster.exits import EXIT_FAILED, RunError, exit_code, exit_code_of_command
from specextend.config import RunConfig
from specextend.core import DocumentKey
from specextend.data.commits import read_commits
from specextend.data.fingerprint import build_manifest, read_manifest, write_manifest
from specextend.data.inputs import InputOptions, InputUnreachableError, OutputOptions
from specextend.data.source import open_source
from specextend.data.storage import atomic_output, resolve, write_bytes
from tests.data.conftest import commit_all, input_error, opened, row_of
from tests.data.s3_server import ACCESS_KEY, SECRET_KEY, Endpoint
from tests.job.conftest import CONFIG, on, specextend, summarize

FORBIDDEN = "403 Forbidden"
"""No client tries again."""
ANSWERED = Endpoint.fault


@pytest.fixture
def output(s3):
    return resolve("s3://corpus/runs/one night")


def upload(name, columns, group_rows=2):
    with atomic_output(resolve(f"s3://corpus/{name}")) as path:
        pq.write_table(pa.table(columns), path, row_group_size=group_rows)


def test_keys_are_named_as_they_are(s3):
    """Hive folders as Spark writes them, and `#` in a name: what is written there has the very key."""
    folder = "in/date=2026-01-01%2000%3A00/run#1"
    upload(f"{folder}/a b.parquet", {"text": ["one", "two"]})
    upload(f"{folder[:-1]}2/a b.parquet", {"text": ["three"]})
    assert f"{folder}/a b.parquet" in s3.files()
    source = opened(f"s3://corpus/{folder}")
    row = row_of(source, 1)
    assert (row.doc_id, row.text) == ("a b.parquet:1", "two")
    every = opened("s3://corpus/in/date=*/run#?/*.parquet")
    names = [file.relative_path.removeprefix("date=2026-01-01%2000%3A00/") for file in every.files]
    assert names == ["run#1/a b.parquet", "run#2/a b.parquet"]
    assert row_of(every, 0, 1).text == "three"


@pytest.mark.parametrize("path", ["lake", "lake/orders/day=1", "lake/orders/day=1/*.parquet", "lake/**/a.parquet"])
def test_a_table_on_a_store_is_refused_by_its_name(s3, path):
    """As on a disk. Whoever may not list what lies above the input may read it all the same."""
    upload("lake/orders/day=1/a.parquet", {"text": ["one"]})
    if path.startswith("lake/orders"):
        s3.fault = lambda method, query: FORBIDDEN if "prefix=" in query and "day" not in query else None
    assert opened(f"s3://corpus/{path}").num_rows == 1
    s3.fault = ANSWERED
    write_bytes(resolve("s3://corpus/lake/orders/_delta_log/00000000000000000000.json"), b"{}")
    with input_error(r"belongs to a Delta table .*delta_scan\('s3://corpus/lake/orders'\)"):
        opened(f"s3://corpus/{path}")


REFUSALS = {
    "a small file": lambda method, path: method == "PUT",
    "a piece": lambda method, path: "partNumber=2" in path,
    "the last request of an upload": lambda method, path: method == "POST" and "uploadId" in path,
    "the copy to its name": lambda method, path: method == "PUT" and path.endswith("/part-00000.parquet"),
}


@pytest.mark.parametrize("refused", REFUSALS)
def test_a_rewrite_that_fails_leaves_the_good_file_as_it_was(s3, output, refused):
    """It was deleted: yesterday's summaries were gone because today's could not be written."""
    location = output.child("summaries", "part-00000.parquet")
    write_bytes(location, b"yesterday's")
    s3.fault = lambda *request: FORBIDDEN if REFUSALS[refused](*request) else None

    def rewrite():
        with atomic_output(location) as path:
            Path(path).write_bytes(os.urandom(1 << 20) * (1 if refused == "a small file" else 25))

    with pytest.raises(OSError, match="AWS Error"):
        rewrite()
    s3.fault = ANSWERED
    written = [data for name, data in s3.files().items() if not name.endswith("/")]  # as a folder's does
    assert written == [b"yesterday's"], "and nothing else that somebody would take for data"


@pytest.mark.slow
@pytest.mark.parametrize("path", ["s3://corpus/in", "s3://corpus/in/*.parquet"])
def test_a_store_that_is_away_at_the_start_is_no_mistake_of_the_configuration(s3, path):
    """Exit 2 would keep a scheduler from trying again."""
    upload("in/a.parquet", {"text": ["one"]})
    config = RunConfig.load(CONFIG, [f"input.path={path}", "output.path=out", "input.id_column=null"])
    s3.fault = lambda *request: "503 Slow Down"
    with pytest.raises(RunError, match=r"^input.path .* cannot be listed .*; run again$") as said:
        check_run(config)
    assert exit_code(said.value) == EXIT_FAILED


@pytest.mark.slow
def test_a_store_that_does_not_answer_is_told_from_a_file_that_changed(s3):
    """The one comes back, so what is to be done can wait for it; and a document still has a name."""
    upload("in/a.parquet", {"text": ["one", "two", "three"], "id": ["x", "y", "z"]})
    source = opened("s3://corpus/in", id_column="id")
    s3.fault = lambda *request: "503 Slow Down"
    with pytest.raises(InputUnreachableError, match=r"^a.parquet cannot be reached \(.*\); run again$"):
        source.check_unchanged(0)
    with pytest.raises((OSError, InputUnreachableError)):
        row_of(source, 1)
    assert source.doc_id(DocumentKey(0, 1)) == "a.parquet:1"
    assert not is_damaged_row(source, DocumentKey(0, 1))
    s3.fault = ANSWERED
    source.check_unchanged(0)
    assert row_of(source, 1).doc_id == "y"


@pytest.mark.parametrize("status", [FORBIDDEN, "200 OK"])
def test_a_passing_403_or_an_empty_body_damages_neither_a_commit_nor_the_input(s3, output, status):
    """Both were "cannot be read as Parquet; repair or remove it", and a commit was to be deleted."""
    upload("in/a.parquet", {"text": ["one", "two", "three"]})
    source = opened("s3://corpus/in")
    write_manifest(output, build_manifest(source, {}, {}))
    commit_all(source, output)
    for read in (
        lambda: read_commits(output),
        lambda: read_manifest(output),
        lambda: opened("s3://corpus/in"),
        lambda: row_of(source, 0),
        lambda: [*source.scan()],
    ):
        s3.fault = lambda method, path: status if method == "GET" and "?" not in path else None
        with pytest.raises((OSError, ValueError)) as error:
            read()
        assert exit_code_of_command(error.value) == EXIT_FAILED
        s3.fault = ANSWERED
        read()
    assert len(read_commits(output).done) == 3


def test_an_output_bucket_that_is_not_there_is_refused_in_one_line(s3):
    """Not after the first commit."""
    upload("in/a.parquet", {"text": ["one"]})
    with input_error("bucket nobody-made-this does not exist; give another folder"):
        open_source(InputOptions(path="s3://corpus/in"), OutputOptions(path="s3://nobody-made-this/out"))


@pytest.mark.parametrize(
    "uri",
    [
        f"s3://{ACCESS_KEY}:{SECRET_KEY}@corpus/in",
        f"s3://{ACCESS_KEY}@corpus/in",
        f"s3://{ACCESS_KEY}:{SECRET_KEY}#x@corpus/in",
        f"s3://{ACCESS_KEY}:{SECRET_KEY}/x@corpus/in",
        f"s3://corpus/in?region=us-east-1&secret_key={SECRET_KEY}",
        f"abfs://:{SECRET_KEY}@account.dfs.core.windows.net/in",
        f"abfs://account.dfs.core.windows.net/in?client_secret={SECRET_KEY}",
        *(f"s3://corpus/in?{name}={SECRET_KEY}" for name in ("token", "access_token", "api_key", "key", "password")),
        f"s3://corpus/in?X-Amz-Signature={SECRET_KEY}",
        f"s3://corpus/in?region=eu-west-1&X%2DAmz%2DCredential={ACCESS_KEY}",
        f"https://store.example/in?Signature={SECRET_KEY}",
        f"https://{SECRET_KEY}@store.example/in",
        f"gs://{SECRET_KEY}@corpus/in",
        f"gs://{SECRET_KEY}%40corpus/in",
        f"s3://corpus/in?endpoint_override={ACCESS_KEY}:{SECRET_KEY}@127.0.0.1",
        f"s3://corpus/in?endpoint_override=https%3A%2F%2F{SECRET_KEY}%40127.0.0.1",
        f"s3://corpus/in?region=x;secret_key={SECRET_KEY}",
    ],
)
def test_a_uri_with_credentials_is_refused_and_not_repeated(uri):
    """It would be in the manifest, in the report and in every message: credentials come from the environment."""
    for attempt in (resolve, lambda uri: InputOptions(path=uri), lambda uri: OutputOptions(path=uri)):
        with pytest.raises(ValueError, match="not contain credentials; set them in the environment") as caught:
            attempt(uri)
        assert SECRET_KEY not in str(caught.value)
        assert ACCESS_KEY not in str(caught.value)


def test_a_user_and_an_at_sign_are_no_secret():
    assert resolve("s3://corpus/mail@example.org/in?region=us-east-1").path == "corpus/mail@example.org/in"
    for uri in (
        "abfs://container@account.dfs.core.windows.net/in",
        "gs://anonymous@corpus/in?scheme=http&endpoint_override=127.0.0.1%3A9000",
        "hdfs://user@namenode:8020/in?replication=3",
        "s3://corpus/year=202?/day=1/part-?.parquet",
    ):
        assert InputOptions(path=uri).path == uri


def test_a_shipped_source_carries_no_credentials(s3):
    """It goes through Ray's object store; workers have an environment of their own."""
    upload("in/a.parquet", {"text": ["one"]})
    options = InputOptions(path="s3://corpus/in")
    shipped = pickle.dumps(open_source(options, OutputOptions(path="s3://corpus/out")))
    assert SECRET_KEY.encode() not in shipped
    assert ACCESS_KEY.encode() not in shipped


@pytest.mark.slow
def test_a_whole_job_reads_and_writes_object_storage(s3):
    """The main job on a local Ray: exactly one row for each row, no credentials in any file or line of it."""
    text = [None if row % 5 == 4 else f"Document {row} is about dams. " * 9 for row in range(10)]
    upload("in/a.parquet", {"text": text, "topic": list(range(10))}, group_rows=4)
    settings = "input.id_column=null input.passthrough=[topic] job.max_error_fraction=0.5 decoding.max_new_tokens=8"
    known = [*on("s3://corpus/in", "s3://corpus/out", *settings.split()), "--task", "summary"]
    ended = summarize(*known).exits(0)
    assert column("summaries", "topic") == [0, 1, 2, 3, 5, 6, 7, 8]
    assert [key["row"] for key in column("errors", "key")] == [4, 9]
    files = s3.files()
    assert "out/_SUCCESS" in files
    parts = [("PUT", f"/corpus/{name}") for name in files if name.startswith("out/_run/parts/part-")]
    assert {change for change in s3.changes() if "/_run/parts/part-" in change[1]} == {*parts}, "one request a part"
    for more, to in ("--follow", "live"), ("", "answers.csv"):
        told = specextend(f"export s3://corpus/out {more} --to s3://corpus/{to}").exits(0)
        assert told.stdout == f"8 of 10 documents in s3://corpus/{to}; 2 failed\n"
    assert {"live", "answers.csv"} <= {name.partition("/")[0] for name in s3.files()}
    s3.requests.clear()
    summarize(*known).exits(0)
    assert [path for method, path in s3.changes() if method == "PUT" and "/part-" in path] == [], "nothing is rewritten"
    summarize(*known, "--task", "translation").exits(0)
    assert column("added/translation/summaries", "topic")
    said = [ended.stdout.encode(), ended.stderr.encode(), *files.values()]
    assert not [text for text in said if SECRET_KEY.encode() in text or ACCESS_KEY.encode() in text]


def column(folder, name):
    place = resolve(f"s3://corpus/out/{folder}")
    return pq.read_table(place.path, filesystem=place.filesystem)[name].to_pylist()
