"""Documents from elsewhere, through the command that a user types."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pypdf
import pytest
from pypdf.generic import ArrayObject, DecodedStreamObject, DictionaryObject, NameObject

from specextend.data.importers import read_pdf_folder, read_text_folder, write_documents
from specextend.data.inputs import InputError
from specextend.data.storage import resolve

ROOT = Path(__file__).parents[2]


def prepare(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "jobs" / "prepare.py"), *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def write_pdf(path: Path, *pages: str, codec: str | None = None, algorithm: str = "", password: str = "") -> Path:
    """A line of text on each page, none where it is empty; the codec is what the last page claims to be packed with."""
    writer = pypdf.PdfWriter()
    font = {"/Type": "/Font", "/Subtype": "/Type1", "/BaseFont": "/Helvetica"}
    names = DictionaryObject({NameObject(key): NameObject(value) for key, value in font.items()})
    for text in pages:
        page = writer.add_blank_page(200, 200)
        fonts = DictionaryObject({NameObject("/F1"): names})
        page[NameObject("/Resources")] = DictionaryObject({NameObject("/Font"): fonts})
        content = DecodedStreamObject()
        content.set_data(f"BT /F1 12 Tf 20 100 Td ({text}) Tj ET".encode() if text else b"")
        if codec is not None and len(writer.pages) == len(pages):
            content[NameObject("/Filter")] = ArrayObject([NameObject(codec)])
        page[NameObject("/Contents")] = writer._add_object(content)
    if algorithm:
        writer.encrypt(user_password=password, owner_password="owner", algorithm=algorithm)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        writer.write(file)
    return path


def test_a_folder_of_pdfs_becomes_parquet(tmp_path: Path) -> None:
    """A report that may be read but not printed is encrypted without a password, and most agencies publish such."""
    write_pdf(tmp_path / "in" / "sub" / "a.PDF", "First page.", "", "Third page.", algorithm="AES-256")
    write_pdf(tmp_path / "in" / "b.pdf", "Another report.", algorithm="RC4-128")
    assert [(row["id"], row["text"]) for row in read_pdf_folder(tmp_path / "in")] == [
        ("b.pdf", "Another report."),
        ("sub/a.PDF", "First page.\n\nThird page."),
    ]


def write_unreadable(folder: Path) -> dict[str, str]:
    """One PDF for each reason, and what is said about it."""
    write_pdf(folder / "scan.pdf", "", "")
    write_pdf(folder / "locked.pdf", "text", algorithm="RC4-128", password="secret")
    write_pdf(folder / "page.pdf", "fine", "not fine", codec="/Unheard")
    (folder / "empty.pdf").write_bytes(b"")
    return {
        "scan.pdf": "scan.pdf has no text, as if it were scanned",
        "locked.pdf": "locked.pdf needs a password",
        "page.pdf": "page.pdf, page 2, cannot be read: ",
        "empty.pdf": "empty.pdf cannot be read: ",
    }


def test_unreadable_files_are_refused_or_left_out_by_choice_named_and_counted(tmp_path: Path) -> None:
    """Ten thousand reports are not held up by three scans, and nobody finds out later that some are missing."""
    reasons = write_unreadable(tmp_path / "in")
    write_pdf(tmp_path / "in" / "fine.pdf", "One report.")
    refused = prepare(tmp_path, "pdf", "in", "--output", "out.parquet")
    assert (refused.returncode, refused.stderr.count("\n")) == (2, 1), refused.stderr
    assert refused.stderr.endswith("; repair or remove the file, or leave out all such files (--skip-unreadable)\n")
    assert not (tmp_path / "out.parquet").exists()
    done = prepare(tmp_path, "pdf", "in", "--output", "out.parquet", "--skip-unreadable")
    assert (done.returncode, done.stdout) == (
        0,
        f"1 document in out.parquet; unreadable files left out: {len(reasons)}\n",
    )
    assert pq.read_table(tmp_path / "out.parquet").column("id").to_pylist() == ["fine.pdf"]
    lines = done.stderr.splitlines()
    assert len(lines) == len(reasons)
    for line, name in zip(lines, sorted(reasons), strict=True):
        assert line.startswith(f"left out: in/{reasons[name]}")


def test_files_of_another_kind_are_named_and_counted(tmp_path: Path) -> None:
    """Somebody whose reports are DOCX beside text should not find out from the number of summaries."""
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for name in ("a.txt", "b.docx", "sub/c.html", ".hidden", *(f"{number}.doc" for number in range(5))):
        (tmp_path / "in" / name).write_text("text")
    done = prepare(tmp_path, "text", "in", "--output", "in/out.parquet")
    assert (done.returncode, done.stdout) == (0, "1 document in in/out.parquet\n")
    said = "7 files (0.doc, 1.doc, 2.doc, 3.doc, 4.doc and 2 more)"
    assert done.stderr == f"of another kind, left out: {said}\n"


def test_a_folder_in_the_place_of_a_file_and_a_file_in_that_of_a_folder_are_named(tmp_path: Path) -> None:
    """The folder was found out after the last document, in words of a temporary file; `.pdf` was shown as a pattern."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a.txt").write_text("a")
    with pytest.raises(InputError, match=r"/in is a folder; name the file to write, such as .*/in/documents\.parquet$"):
        write_documents(iter([]), resolve(str(tmp_path / "in")))
    for wrong in ("nowhere", "in/a.txt"):
        with pytest.raises(InputError, match=f"{wrong} is no folder; give the folder that holds the files"):
            next(read_text_folder(tmp_path / wrong, "*.txt"))
    with pytest.raises(InputError, match=r"/in contains no \*\.pdf; give a folder of such files"):
        next(read_pdf_folder(tmp_path / "in"))


def test_files_with_large_row_groups_are_written_in_smaller_ones(tmp_path: Path) -> None:
    """What the job asks for where a worker could not hold a row group. Every column and type stays."""
    table = pa.table(
        {"text": [f"{row} " * 500_000 for row in range(40)], "kind": pa.array(["a", "b"] * 20).dictionary_encode()}
    )
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("a.parquet", "deep/b.parquet"):
        pq.write_table(table, tmp_path / "in" / name, compression="none", use_dictionary=["kind"])
    done = prepare(tmp_path, "repartition", "in", "--output", "out")
    assert (done.returncode, done.stdout) == (0, "2 files in out\n"), done.stderr
    metadata = pq.read_metadata(tmp_path / "out" / "deep" / "b.parquet")
    assert metadata.num_row_groups > 2
    assert max(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups)) < 20 << 20
    assert pq.read_table(tmp_path / "out" / "deep" / "b.parquet").to_pylist() == table.to_pylist()
    assert prepare(tmp_path, "repartition", "in", "--output", "in/out").returncode == 2
