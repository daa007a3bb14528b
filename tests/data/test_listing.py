"""Which files the input is, and that the output is apart from it."""

import pytest

from specextend.data.inputs import InputError, InputOptions, InputUnreachableError, OutputOptions
from specextend.data.listing import list_input
from specextend.data.source import open_source
from tests.data.conftest import input_error, opened
from tests.refused import refused


def test_a_folder_is_searched_in_path_order_without_hidden_and_other_files(tmp_path, write):
    for name in ("b.parquet", "a/z.pq", "C.PARQUET", "c.gz.parquet", "d.parq", "_run/c.parquet", ".d.parquet"):
        write(f"in/{name}", {"text": ["x"]})
    (tmp_path / "in" / "README.md").write_text("not data")
    names = ("C.PARQUET", "a/z.pq", "b.parquet", "c.gz.parquet", "d.parq")
    assert list_input(f"{tmp_path}/in").relative_paths == names


def test_files_that_are_not_read_are_counted_by_what_they_end_in(tmp_path, write):
    """Half a corpus may lie there in another format; what tools leave behind under hidden names does not count."""
    write("in/a.parquet", {"text": ["x"]})
    for folder in ("deep", "_old"):
        (tmp_path / "in" / folder).mkdir()
    for name in [
        "b.jsonl",
        "deep/c.jsonl",
        "d.jsonl.gz",
        "part-0",
        "e.parquet.zip",
        "_SUCCESS",
        ".a.crc",
        "_old/f.csv",
    ]:
        (tmp_path / "in" / name).touch()
    source = opened(tmp_path / "in")
    assert source.skipped == {".jsonl": 2, ".jsonl.gz": 1, "without an extension": 1, ".parquet.zip": 1}
    said = "2 .jsonl, 1 .jsonl.gz, 1 .parquet.zip, 1 without an extension"
    assert source.warning == f"ignored files in {tmp_path}/in: {said}"
    assert opened(f"{tmp_path}/in/*.parquet").warning == ""
    (tmp_path / "in" / "a.parquet").unlink()
    with input_error(r"in .parquet, .pq, .parq, only 2 .jsonl, .*specextend prepare documents .*in --output FOLDER"):
        list_input(f"{tmp_path}/in")


@pytest.mark.parametrize(
    "pattern, names",
    [
        ("20*/x.parquet", ("2024/x.parquet", "2025/x.parquet")),
        ("2025/**/x.parquet", ("deep/x.parquet", "x.parquet")),
        ("2025/?.parquet", ("x.parquet",)),
    ],
)
def test_a_glob_is_relative_to_the_folder_before_its_first_wildcard(tmp_path, write, pattern, names):
    for name in ("2024/x.parquet", "2025/x.parquet", "2025/deep/x.parquet"):
        write(name, {"text": ["x"]})
    assert list_input(f"{tmp_path}/{pattern}").relative_paths == names


@pytest.mark.parametrize("pattern", ["", "/**/*.parquet"])
def test_what_symbolic_links_lead_to_is_read_once(tmp_path, write, pattern):
    """`latest` beside the nights doubled a night, and two loops made a listing without an end.

    Files of a mounted volume are links into a hidden folder: the first one counts.
    """
    for name in ("in/2026-11-22/a.parquet", "in/2026-11-23/a.parquet", "elsewhere/b.parquet", "in/..data/c.parquet"):
        write(name, {"text": ["x"]})
    folder = tmp_path / "in"
    for link, target in (("1st", "2026-11-22/a.parquet"), ("latest", "2026-11-23"), ("loop", "."), ("other", ".")):
        (folder / link).symlink_to(target)
    (folder / "2026-11-22" / "up").symlink_to(folder)
    (folder / "linked").symlink_to(tmp_path / "elsewhere")
    for link in ("x.parquet", "y.parquet"):
        (folder / link).symlink_to("..data/c.parquet")
    source = opened(f"{folder}{pattern}")
    names = ["2026-11-22/a.parquet", "2026-11-23/a.parquet", "linked/b.parquet", "x.parquet"]
    assert [file.relative_path for file in source.files] == names
    assert source.warning.endswith("2 symbolic links to files already listed")


def test_a_link_to_nothing_is_out_of_reach_and_not_left_out(tmp_path, write):
    """The disk that it leads to was not mounted: the run was complete without those documents, with exit 0."""
    write("in/a.parquet", {"text": ["x"]})
    (tmp_path / "in" / "gone.parquet").symlink_to("nowhere")
    with pytest.raises(InputUnreachableError, match=r"gone\.parquet cannot be reached"):
        opened(tmp_path / "in")


def test_an_input_that_cannot_be_listed_or_named_is_refused(tmp_path):
    with input_error("cannot be listed"):
        list_input("nowhere://bucket/x")
    (tmp_path / "caf\udce9.parquet").touch()
    with input_error("contains a name that is not UTF-8"):  # which Parquet could not hold in an id
        list_input(str(tmp_path))


@pytest.mark.parametrize(
    "path, output, message",
    [
        ("in", "in", "inside the input folder"),
        ("in", "in/_out", "inside the input folder"),
        ("in/**/*.parquet", "in/out", "matched by the input's glob"),
        ("in/sub", "in", "is inside output.path"),
        ("in/a.parquet", "in", "is inside output.path"),
        ("in", "in/a.parquet", "is a file; give a folder"),
        ("link", "in/out", "inside the input folder"),
    ],
)
def test_input_and_output_must_be_apart(tmp_path, write, path, output, message):
    """A second start would summarise the summaries of the first."""
    write("in/a.parquet", {"text": ["x"]})
    write("in/sub/b.parquet", {"text": ["x"]})
    (tmp_path / "link").symlink_to(tmp_path / "in")
    with input_error(message):
        open_source(InputOptions(path=f"{tmp_path}/{path}"), OutputOptions(path=f"{tmp_path}/{output}"))


TABLES = {
    "Delta": ("_delta_log/00000000000000000000.json", "COPY (FROM delta_scan('{}')) TO"),
    "Hudi": (".hoodie/hoodie.properties", "spark.read.format(\"hudi\").load('{}')"),
    "Iceberg": ("metadata/00002-9c12d441-03fe-4693-9a96-a0705ddf69c1.metadata.json", "iceberg_scan('{}')"),
}


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/lake",
        "/lake/orders",
        "/lake/orders/data/day=1",
        "/lake/orders/data/day=1/a.parquet",
        "/lake/*/*/*/a.parquet",
        "/lake/orders/**",
        "/lake/orders/data/day=1/*.parquet",
        "/link",
        "/link/a.parquet",
        "/links",
        "/link.parquet",
    ],
)
@pytest.mark.parametrize("kind", TABLES)
def test_a_table_is_refused_by_its_name_with_the_line_that_exports_it(tmp_path, write, kind, path):
    """Its files hold rows that were deleted, which would come back in the summaries with exit 0."""
    write("lake/orders/data/day=1/a.parquet", {"text": ["x"]})
    write("lake/plain/metadata/b.parquet", {"text": ["x"]})
    (tmp_path / "links").mkdir()
    folder = tmp_path / "lake/orders/data/day=1"
    for link in ("link", "links/one"):
        (tmp_path / link).symlink_to(folder)
    (tmp_path / "link.parquet").symlink_to(folder / "a.parquet")
    assert list_input(f"{tmp_path}{path}").relative_paths
    record, export = TABLES[kind]
    orders = tmp_path / "lake/orders"
    (orders / record).parent.mkdir()
    (orders / record).write_text("{}")
    message = refused(list_input, f"{tmp_path}{path}", kind=InputError)
    assert f"input.path {tmp_path}{path} belongs to a{'n' * (kind == 'Iceberg')} {kind} table (" in message
    assert export.format(orders) in message
    assert list_input(f"{tmp_path}/lake/plain").relative_paths == ("metadata/b.parquet",)
    assert list_input(f"{tmp_path}/lake/pl*/**").relative_paths == ("plain/metadata/b.parquet",)
