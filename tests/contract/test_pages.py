"""Pages of a document, from its file to the results of a run."""

import pyarrow.parquet as pq

from tests.data.test_documents import pages
from tests.job.conftest import CONFIG, on, read_json, rows, specextend, write_corpus

SCHEMA = "{said: {type: string, pattern: '^Budget$'}}"


def test_a_run_names_the_pages_of_a_pdf_and_its_report_knows_the_file(summarize_here, tmp_path):
    """Without a key more. A document of a kind without pages has none."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "a b.pdf").write_bytes(pages("Contents", "", "The committee met.", "Budget of the year."))
    (tmp_path / "in" / "c.txt").write_text("Budget of the year.")
    specextend("prepare", "documents", tmp_path / "in", "--output", tmp_path / "documents").exits(0)
    settings = [f"output.schema={SCHEMA}", "output.column=answer", "output.sources=true", "decoding.max_new_tokens=60"]
    settings += ["input.id_column=null", "input.passthrough=[source_path]"]
    summarize_here(*on(tmp_path / "documents", tmp_path / "out", *settings)).exits(0)
    [of_pdf, of_text] = sorted(rows(tmp_path / "out" / "summaries"), key=lambda row: row["doc_id"])
    text = pq.read_table(tmp_path / "documents").sort_by("id")["text"][0].as_py()
    [evidence] = of_pdf["evidence"]
    assert evidence["page"] == 4
    assert text[evidence["begin"] : evidence["end"]] == "Budget"
    assert [each["page"] for each in of_text["evidence"]] == [None]
    report = read_json(tmp_path / "out" / "report.json")
    files = {text["doc_id"]: text["pdf"] for text in report["texts"]["random"]}
    assert files == {"a b.pdf": (tmp_path / "in" / "a b.pdf").as_uri(), "c.txt": None}


def test_a_plan_counts_pages_that_do_not_fit_their_text(plan, tmp_path):
    """A column of another text is found before the night, not after it."""
    corpus = write_corpus(tmp_path / "a.parquet", ["one", "two"], starts=[[0, 2], [0, 9]])
    said = plan("--config", CONFIG, *on(corpus, tmp_path / "out", "input.id_column=null", "input.pages_column=starts"))
    assert "2 of 2 rows to do, 1 of them rejected" in " ".join(said.stdout.split())
    assert "pages that do not fit the text" in said.stdout
