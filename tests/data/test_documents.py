"""Files of many kinds to one data set: what is read, what is said of the rest, and what the next call does."""

from __future__ import annotations

import io
import json
import os
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pypdf
import pytest
from pypdf.generic import DecodedStreamObject, DictionaryObject, NameObject

from specextend.data.document_kinds import DocumentOptions, check_packages
from specextend.data.documents import ERRORS, Prepared, prepare_documents
from specextend.data.inputs import InputError
from specextend.data.storage import resolve, write_bytes
from tests.data.s3_server import s3_server
from tests.job.conftest import LONGEST_S, Ended, in_process


def write_pdf(path: Path, *pages: str, algorithm: str = "", password: str = "", title: str = "") -> Path:
    """A line of text on each page, none where it is empty."""
    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    names = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    for text in pages:
        page = writer.add_blank_page(500, 200)
        fonts = DictionaryObject({NameObject("/F1"): names})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        shown = " ".join(f"({line}) Tj T*" for line in text.split("\n"))
        content.set_data(f"BT /F1 12 Tf 14 TL 20 150 Td {shown} ET".encode() if text else b"")
        page[NameObject("/Contents")] = writer._add_object(content)
    writer.add_metadata({"/Title": title})
    if algorithm:
        writer.encrypt(user_password=password, owner_password="owner", algorithm=algorithm)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer.write(file)
    return path


def docx(*paragraphs: str) -> bytes:
    word = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"
    kind = "application/vnd.openxmlformats-officedocument.wordprocessingml.document.main+xml"
    package = "http://schemas.openxmlformats.org/package/2006"
    document = "http://schemas.openxmlformats.org/officeDocument/2006/relationships/officeDocument"
    body = "".join(f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>" for text in paragraphs)
    files = {
        "[Content_Types].xml": f'<Types xmlns="{package}/content-types">'
        f'<Override PartName="/word/document.xml" ContentType="{kind}"/></Types>',
        "_rels/.rels": f'<Relationships xmlns="{package}/relationships">'
        f'<Relationship Id="r" Type="{document}" Target="word/document.xml"/></Relationships>',
        "word/document.xml": f'<w:document xmlns:w="{word}"><w:body>{body}</w:body></w:document>',
    }
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return packed.getvalue()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def prepare(folder: Path) -> Callable[..., Prepared]:
    def call(*sources: str, output: str = "", **options: Any) -> Prepared:
        wanted = DocumentOptions(workers=2, **options)
        return prepare_documents(sources or [str(folder)], output or f"{folder}.out", wanted, lambda done, total: None)

    return call


def rows(folder: Path, *columns: str) -> list[Any]:
    """Rows of the data set by id; of one column its values."""
    table = pq.read_table(f"{folder}.out").sort_by("id")
    return table[columns[0]].to_pylist() if len(columns) == 1 else table.select(columns).to_pylist()


def failures(folder: Path) -> dict[str, str]:
    """Reason of each line of the errors file, by name and line."""
    lines = map(json.loads, Path(f"{folder}.out", ERRORS).read_text(encoding="utf-8").splitlines())
    return {
        "".join((Path(line["path"]).name, f":{line['row']}" if line["row"] else "")): line["reason"] for line in lines
    }


def test_a_mixed_folder_becomes_one_data_set(folder: Path, prepare: Callable[..., Prepared]) -> None:
    """Reports lie as they come: kinds side by side, in subfolders, in capitals, compressed."""
    write_pdf(folder / "deep" / "a.PDF", "First page.", "", "Third page.", algorithm="AES-256")
    (folder / "b.docx").write_bytes(docx("One &amp; two.", "Three."))
    (folder / "c.html").write_text(
        "<title>A\n title</title><p>a <b>bold</b>\nword<ul><li>one<li>two</ul><script>x</script>"
    )
    (folder / "d.md").write_text("some\n\n# Its title\n\ntext")
    (folder / "e.txt").write_bytes("\ufeffcafé".encode())
    (folder / "f.jsonl").write_text('{"text": "line"}\n')
    (folder / "g.csv").write_text('text;pages\n"one\ntwo";007\n')
    (folder / ".hidden.txt").write_text("hidden")
    (folder / "again.txt").symlink_to("e.txt")
    (folder / "loop").symlink_to(folder)
    assert not prepare().has_failed
    assert rows(folder, "id", "title", "text") == [
        {"id": "b.docx", "title": "b", "text": "One & two.\nThree."},
        {"id": "c.html", "title": "A title", "text": "a bold word\none\ntwo"},
        {"id": "d.md", "title": "Its title", "text": "some\n\n# Its title\n\ntext"},
        {"id": "deep/a.PDF", "title": "a", "text": "First page.\n\nThird page."},
        {"id": "e.txt", "title": "e", "text": "café"},
        {"id": "f.jsonl:1", "title": None, "text": "line"},
        {"id": "g.csv:3", "title": None, "text": "one\ntwo"},
    ]
    assert rows(folder, "pages")[-1] == "007"
    assert rows(folder, "source_path")[0] == str(folder / "b.docx")


def test_what_cannot_be_read_is_named_with_its_reason_and_the_rest_is_there(folder: Path) -> None:
    """Ten thousand reports are not held up by three scans, and nobody finds out later that some are missing."""
    write_pdf(folder / "fine.pdf", "One report.")
    write_pdf(folder / "scan.pdf", "", "")
    write_pdf(folder / "locked.pdf", "text", algorithm="RC4-128", password="secret")
    (folder / "empty.pdf").write_bytes(b"")
    (folder / "old.docx").write_bytes(bytes.fromhex("d0cf11e0a1b11ae1"))
    (folder / "latin.txt").write_bytes("café".encode("latin-1"))
    (folder / "caf\udce9.txt").write_text("text")
    (folder / "photo.jpg").write_bytes(b"\xff\xd8")
    (folder / "blank.md").write_text(" \n")
    arguments = ["documents", str(folder), "--output", f"{folder}.out"]
    ended = in_process("prepare.py", *arguments)
    assert (ended.code, rows(folder, "id")) == (3, ["fine.pdf"])
    assert failures(folder) == {
        "scan.pdf": "no text",
        "locked.pdf": "password",
        "empty.pdf": "damaged",
        "old.docx": "damaged",
        "latin.txt": "encoding",
        "caf\udce9.txt": "bad name",
        "photo.jpg": "left out",
        "blank.md": "no text",
    }
    assert ended.stdout == (
        f"1 document in {folder}.out; no text: 2, damaged: 2, bad name: 1, encoding: 1, password: 1, left out: 1 "
        f"(see {folder}.out/{ERRORS})\n"
    )
    assert f"damaged: {folder}/empty.pdf cannot be read: Failed to load" in ended.stderr
    (folder / "a.csv").write_text("nr\n1\n2\n3\n")
    told = in_process("prepare.py", *arguments)
    assert told.stderr.count("has no string 'text'") == 1
    assert "a.csv:2 has no string 'text'; it has 'nr'; " in told.stderr
    assert "(and 2 more like this)" in told.stderr
    assert "; 0 files read, 7 failed, 1 unchanged; " in told.stdout
    (folder / "a.csv").unlink()
    again = in_process("prepare.py", *arguments, "--encoding", "latin-1", "--skip-unreadable")
    assert (again.code, rows(folder, "text")) == (0, ["One report.", "café"])


@pytest.mark.parametrize("title", ["(anonymous)", "Untitled", "Microsoft Word - draft.doc"])
def test_a_title_that_a_program_wrote_by_itself_is_none(
    folder: Path, prepare: Callable[..., Prepared], title: str
) -> None:
    """The name of the file says more."""
    write_pdf(folder / "report.pdf", "One report.", title=title)
    prepare()
    assert rows(folder, "title") == ["report"]


def test_another_call_reads_what_is_new_or_changed_or_has_failed(
    folder: Path, prepare: Callable[..., Prepared]
) -> None:
    """Every night a few hundred reports come to a hundred thousand."""
    for name in "abcd":
        (folder / f"{name}.txt").write_text(name)
    (folder / "e.txt").write_bytes(b"\xe9")
    (folder / "many.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n')
    first = prepare(limit=4)
    assert (first.num_read, first.num_waiting) == (4, 2)
    prepare()
    (folder / "a.txt").write_text("changed")
    (folder / "b.txt").unlink()
    (folder / "f.txt").write_text("new")
    os.utime(folder / "c.txt", ns=(1, 1))
    second = prepare(encoding="latin-1")
    assert (second.num_read, second.num_unchanged) == (4, 2)
    assert rows(folder, "text") == ["changed", "b", "c", "d", "é", "new", "1", "2"]
    assert failures(folder) == {"b.txt": "gone"}
    assert not second.has_failed
    third = prepare(remove_gone=True)
    assert (third.num_read, rows(folder, "text")) == (0, ["changed", "c", "d", "é", "new", "1", "2"])
    assert len(list(Path(f"{folder}.out").glob("part-*"))) == 1


def test_a_file_that_hangs_its_reader_fails_alone(folder: Path, prepare: Callable[..., Prepared]) -> None:
    """Elements inside each other, 400,000 deep, take minutes."""
    (folder / "a.html").write_text("<div>" * 400_000)
    for number in range(20):
        (folder / f"{number:02}.txt").write_text("fine")
    prepare(time_limit_s=10)
    assert failures(folder) == {"a.html": "too slow"}
    assert rows(folder, "text") == ["fine"] * 20


def test_a_file_that_ends_its_reader_fails_alone(folder: Path, prepare: Callable[..., Prepared]) -> None:
    """175 KB that unpack to 20 million texts on a page, for which there is no memory."""
    content = zlib.compress(b"BT /F1 11 Tf " + b"(a)Tj " * 20_000_000)
    objects = (
        b"<</Type/Catalog/Pages 2 0 R>>",
        b"<</Type/Pages/Count 1/Kids[5 0 R]>>",
        b"<</Type/Font/Subtype/Type1/BaseFont/Helvetica>>",
        b"<</Length %d/Filter/FlateDecode>>stream\n%s\nendstream" % (len(content), content),
        b"<</Type/Page/Parent 2 0 R/MediaBox[0 0 9 9]/Resources<</Font<</F1 3 0 R>>>>/Contents 4 0 R>>",
    )
    numbered = b"".join(b"%d 0 obj\n%s\nendobj\n" % each for each in enumerate(objects, start=1))
    (folder / "a.pdf").write_bytes(b"%PDF-1.4\n" + numbered + b"trailer<</Size 6/Root 1 0 R>>\n%%EOF")
    write_pdf(folder / "b.pdf", "fine")
    prepare(time_limit_s=LONGEST_S, memory_gib=1.5)
    assert failures(folder) == {"a.pdf": "crashed"}
    assert rows(folder, "text") == ["fine"]


def test_what_a_killed_call_has_left_is_gone_and_what_it_had_read_stays(
    folder: Path, prepare: Callable[..., Prepared]
) -> None:
    """A part that is whole but not announced, half a file, and parts that were joined but not yet deleted."""
    (folder / "a.jsonl").write_text('{"text": "1"}\n{"text": "2"}\n')
    prepare()
    [part] = Path(f"{folder}.out").glob("part-*")
    (part.parent / "part-000009-00000000.parquet").write_bytes(part.read_bytes())
    (part.parent / "_pending-1.parquet").write_bytes(part.read_bytes())
    (part.parent / ".part.0.tmp").write_bytes(b"half")
    (folder / "b.txt").write_text("3")
    assert prepare().num_read == 1
    assert rows(folder, "text") == ["1", "2", "3"]
    assert failures(folder) == {}
    assert len(list(part.parent.iterdir())) == 2


def test_rows_keep_their_columns_and_a_bad_row_aborts_nothing(folder: Path) -> None:
    """Types that differ between rows, files and calls meet in one that holds all values."""
    lines = [
        {"body": "one", "key": 7, "n": 1, "tags": ["a"], "title": "T", "text": "other"},
        {"body": "two", "key": "x", "n": 2.5, "big": 1 << 70},
        {"body": "three", "key": "x", "n": 3},
        {"body": None, "key": "y"},
        {"body": "five"},
    ]
    broken = ['{"body": "\\ud800"}', '{"body": "' + "x" * (1 << 20), "[" * (1 << 20), "9" * 5000, '{"body": "a\0b"}']
    broken += ['{"body": "caf\xe9"}', '{"body": "last", "key": "y"}']
    (folder / "a.jsonl").write_text("\n".join([*map(json.dumps, lines), "", *broken]), "latin-1")
    (folder / "b.csv").write_bytes(b"key,body,n\nx,taken,5\nz,fine,many\nw,caf\xe9,1\nv,short\n")
    fields = ["--text-field", "body", "--id-field", "key"]
    ended = in_process("prepare.py", "documents", str(folder), *fields, "--output", f"{folder}.out")
    assert ended.code == 3
    assert rows(folder, "id", "title", "text", "n", "tags", "big", "text_") == [
        {"id": "7", "title": "T", "text": "one", "n": "1", "tags": '["a"]', "big": None, "text_": "other"},
        {"id": "x", "title": None, "text": "two", "n": "2.5", "tags": None, "big": str(1 << 70), "text_": None},
        {"id": "y", "title": None, "text": "last", "n": None, "tags": None, "big": None, "text_": None},
        {"id": "z", "title": None, "text": "fine", "n": "many", "tags": None, "big": None, "text_": None},
    ]
    repeated, bad = "repeated id", "bad row"
    assert failures(folder) == {
        "a.jsonl:3": repeated,
        **{f"a.jsonl:{number}": bad for number in (4, 5, 7, 8, 9, 10, 11)},
        "a.jsonl:12": "encoding",
        "b.csv:2": repeated,
        "b.csv:4": "encoding",
        "b.csv:5": bad,
    }
    assert "a.jsonl:4 has no string 'body'; it has 'body', 'key'; --text-field names" in ended.stderr
    assert max(map(len, ended.stderr.splitlines())) < 500


def test_several_patterns_sources_and_single_files_lose_none(folder: Path, prepare: Callable[..., Prepared]) -> None:
    """The last `--pattern` alone was used. The ids of two folders must not meet."""
    for name in ("x/a.md", "x/b.log", "x/c.txt", "y/a.md", "y/deep/d.log", "README"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(name)
    arguments = ["text", str(folder), "--pattern", "*.md", "--pattern", "deep/*.log", "--output", f"{folder}.out"]
    assert in_process("prepare.py", *arguments).code == 0
    assert rows(folder, "id") == rows(folder, "text") == ["x/a.md", "y/a.md", "y/deep/d.log"]
    assert failures(folder) == {"README": "left out", "b.log": "left out", "c.txt": "left out"}
    sources = [f"{folder}/x", f"{folder}/y/**/*.md", f"{folder}/README", f"{folder}/x/a.md"]
    prepare(*sources, output=f"{folder}2.out")
    found = pq.read_table(f"{folder}2.out").sort_by("text")
    assert found["text"].to_pylist() == ["README", "x/a.md", "x/c.txt", "y/a.md"]
    assert found["id"].to_pylist() == [f"{folder}/{name}" for name in ("README", "x/a.md", "x/c.txt", "y/a.md")]


def test_the_lines_of_a_pdf_are_joined_unless_they_are_to_be_kept(
    folder: Path, prepare: Callable[..., Prepared]
) -> None:
    """A summary of words that are cut in two at each line is worse, and costs more tokens."""
    text = (
        "Annual report\nThe committee met four times and consid-\nered the budget of the agency, which has\ngrown.\n"
        "The next year begins with a deficit, so\n1. the river is left as it is, and that is\n2. all."
    )
    joined = (
        "Annual report\nThe committee met four times and considered the budget of the agency, which has grown.\n"
        "The next year begins with a deficit, so\n1. the river is left as it is, and that is\n2. all."
    )
    write_pdf(folder / "a.pdf", text)
    prepare()
    prepare(output=f"{folder}2.out", keep_lines=True)
    assert rows(folder, "text") == [joined]
    assert pq.read_table(f"{folder}2.out")["text"].to_pylist() == [text]


def test_an_object_store_is_read_and_written(monkeypatch: pytest.MonkeyPatch, prepare: Callable[..., Prepared]) -> None:
    """And its files are known again by their time and size."""
    with s3_server() as endpoint:
        for name, value in endpoint.environment.items():
            monkeypatch.setenv(name, value)
        endpoint.empty()
        write_bytes(resolve("s3://corpus/in/a.txt"), b"one")
        write_bytes(resolve("s3://corpus/in/b.jsonl"), b'{"text": "two"}\n')
        for read in (2, 0):
            done = prepare("s3://corpus/in/", output="s3://corpus/out")
            assert (done.num_documents, done.num_read, done.failures) == (2, read, [])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["documents", "nowhere"], "nowhere does not exist; give a file, a folder or a glob"),
        (["documents", "empty"], "there is no file to read in empty"),
        (
            ["pdf", "texts"],
            "there is no file to read in texts; 1 file of other kinds; --pattern names those to read as text",
        ),
        (["documents", "texts", "--encoding", "klingon"], "unknown encoding 'klingon'; give one such as cp1252"),
        (["documents", "texts", "--output", "texts/a.txt"], "texts/a.txt is a file; name a folder"),
        (["documents", "texts", "--output", "texts"], "holds a.txt, which is no part of a data set"),
        (["hf", "texts/none"], "texts/none"),
    ],
)
def test_a_wrong_argument_is_one_line(
    arguments: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts" / "a.txt").write_text("a")
    output = [] if "--output" in arguments else ["--output", "out"]
    ended: Ended = in_process("prepare.py", *arguments, *output)
    assert (ended.code, ended.stderr.count("\n")) == (2, 1), ended.stderr
    assert said in ended.stderr
    assert not (tmp_path / "out").exists()


def test_a_missing_package_names_the_kind_of_file_and_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    check_packages({"text", "csv"})
    with pytest.raises(InputError, match=r"to read PDF takes the package pypdfium2: install .* its extra `documents`"):
        check_packages({"text", "pdf"})


def test_a_data_set_of_the_hub_keeps_its_columns(folder: Path) -> None:
    """By its name and split, here one in a local folder."""
    pq.write_table(pa.table({"report": ["one", None, "three"], "pages": [1, 2, 3]}), folder / "test-0.parquet")
    arguments = ["hf", str(folder), "--split", "test", "--text-field", "report", "--output", f"{folder}.out"]
    for _ in range(2):
        ended = in_process("prepare.py", *arguments)
        assert (ended.code, ended.stdout.partition(";")[0]) == (3, f"2 documents in {folder}.out"), ended.stderr
    assert rows(folder, "id", "text", "pages") == [
        {"id": f"{folder}:test:0", "text": "one", "pages": 1},
        {"id": f"{folder}:test:2", "text": "three", "pages": 3},
    ]
