"""Pages of a document, from its file to the results of a run."""

import pyarrow.parquet as pq

from tests.data.test_documents import pages
from tests.job.conftest import CONFIG, on, read_json, rows, specextend, write_corpus

SCHEMA = "{said: {type: string, pattern: '^Budget$'}}"


def test_a_run_names_the_pages_of_a_pdf_and_its_report_knows_the_file(summarize_here, tmp_path):
    """Without a key more. A document of a kind without pages has none."""
    pdf, documents, output = tmp_path / "in" / "a b.pdf", tmp_path / "documents", tmp_path / "out"
    pdf.parent.mkdir()
    pdf.write_bytes(pages("Contents", "", "The committee met.", "Budget of the year."))
    (pdf.parent / "c.txt").write_text("Budget of the year.")
    specextend("prepare", "documents", pdf.parent, "--output", documents).exits(0)
    settings = [f"output.schema={SCHEMA}", "output.column=answer", "output.sources=true", "decoding.max_new_tokens=60"]
    settings += ["input.id_column=null", "input.passthrough=[source_path]"]
    summarize_here(*on(documents, output, *settings)).exits(0)
    evidence = {row["doc_id"]: row["evidence"][0] for row in rows(output / "summaries")}
    assert {name: each["page"] for name, each in evidence.items()} == {"a b.pdf": 4, "c.txt": None}
    text = pq.read_table(documents).sort_by("id")["text"][0].as_py()
    assert text[evidence["a b.pdf"]["begin"] : evidence["a b.pdf"]["end"]] == "Budget"
    files = {text["doc_id"]: text["pdf"] for text in read_json(output / "report.json")["texts"]["random"]}
    assert files == {"a b.pdf": pdf.as_uri(), "c.txt": None}


def test_a_plan_counts_pages_that_do_not_fit_their_text(plan, tmp_path):
    """A column of another text is found before the night, not after it."""
    corpus = write_corpus(tmp_path / "a.parquet", ["one", "two"], starts=[[0, 2], [0, 9]])
    said = plan("--config", CONFIG, *on(corpus, tmp_path / "out", "input.id_column=null", "input.pages_column=starts"))
    assert "2 of 2 rows to do, 1 of them rejected" in " ".join(said.stdout.split())
    assert "pages that do not fit the text" in said.stdout
