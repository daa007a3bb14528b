"""The retrieval study, run for real on the tiny random pair; its documents, its drafts and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.bench import main
from specextend import RunConfig
from specextend.bench.retrieval_study import RetrievalOptions, retrieval
from specextend.bench.study_documents import StudyDocuments
from specextend.bench.study_drafts import draft_label, label_drafts, main_choices, parse_draft, study_choices
from specextend.decoding.decoding_options import CacheOptions
from specextend.drafters.draft_options import DraftOptions
from specextend.models import load_tokenizer
from tests.bench.corpora import ROOT, TARGET

TINY = ["retrieval", "--config", "configs/tiny-random.yaml", "--per-length", "1", "--max-new-tokens", "8"]
SMALL = [*TINY, "--lengths", "1024", "--kinds", "govreport,passkey", "--cache-tokens", "256"]
pytestmark = pytest.mark.usefixtures("at_root_with_threads_kept")


@pytest.fixture(scope="module")
def documents() -> StudyDocuments:
    config = RunConfig.load(ROOT / "configs/smollm2.yaml", ["prompt.length_policy=middle"])
    return StudyDocuments(config, str(ROOT / "examples"), load_tokenizer(str(TARGET)), 8100, seed=0)


def test_every_draft_is_replayed_with_every_cache(tmp_path, capsys):
    """Copies see everything; the first draft is studied. The file says what it is of, and names no place of its own."""
    path = tmp_path / "retrieval.json"
    assert main([*SMALL, "--json", str(path)]) == 0
    result = json.loads(path.read_text())
    drafts = ["draft-model", "ngram", "draft-model+ngram"]
    assert [*result["drafts"]] == drafts
    found = [(cell["draft"], cell["policy"], cell["cache_tokens"], cell["kind"]) for cell in result["cells"]]
    caches = [("full", None), ("streaming", 256), ("retrieval", 256)]
    assert sorted(found, key=str) == sorted(
        [
            (draft, *cache, kind)
            for draft in drafts
            for cache in (caches[:1] if draft == "ngram" else caches)
            for kind in ("govreport", "passkey")
        ],
        key=str,
    )
    studies = {cell["study"] for cell in result["studies"]}
    assert {"as configured", "refresh: every 1"} <= studies
    assert {cell["draft"] for cell in result["studies"]} == {"draft-model"}
    assert all(cell["acceptance_length"]["mean"] >= 1 for cell in (*result["cells"], *result["studies"]))
    assert [each["kind"] for each in result["documents"]] == ["govreport", "passkey"]
    assert str(ROOT) not in path.read_text()
    assert {(cell["kind"], cell["heads"]) for cell in result["layers"]} == {("passkey", "mean")}
    printed = " ".join(capsys.readouterr().out.split())
    assert "Effect of scoring layer and refresh interval (retrieval 256)" in printed
    assert "a fresh selection by one layer alone shows" in printed
    assert "whose source is in view when they are decided" in printed
    assert result["environment"]["versions"]["torch"] in printed


def test_documents_are_whole_and_the_longest_that_fit(documents):
    """A length is a bound; one that is a little longer is cut where there are too few."""
    chosen = documents.choose("govreport", 4096, 3, 64)
    lengths = [len(each.document.prompt_token_ids) for each in chosen]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-1] > 3600
    assert lengths[0] <= 4096
    assert {each.num_dropped_tokens for each in chosen} == {0}
    books = documents.choose("pg19", 7168, 3, 64)
    assert [each.num_dropped_tokens > 0 for each in books] == [True, True, True]
    assert {len(each.document.prompt_token_ids) for each in books} == {7168}
    assert documents.choose("pg19", 3000, 3, 64) != []
    assert documents.choose("govreport", 2560, 3, 64) == []


def test_probes_are_made_of_both_corpora_without_their_long_texts(tmp_path):
    """What a draft may have been trained on would flatter it."""
    for corpus, word in (("govreport", "river"), ("pg19", "castle")):
        rows = [
            {"doc_id": "short", "text": f"The {word} is wide. " * 80},
            {"doc_id": "long", "text": "It rains. " * 1500},
        ]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / f"{corpus}.parquet")
    tokenizer = load_tokenizer(str(TARGET))
    config = RunConfig.load(ROOT / "configs/smollm2.yaml")
    [probe] = StudyDocuments(config, str(tmp_path), tokenizer, 8100, seed=0).choose("passkey", 640, 1, 64)
    text = tokenizer.decode(probe.document.prompt_token_ids)
    assert probe.document.bucket == 640
    assert probe.answer_token_ids is not None
    assert [word in text for word in ("river", "castle", "rains")] == [True, True, False]


@pytest.mark.parametrize(
    ("text", "draft", "label"),
    [
        ("ngram", DraftOptions(kind="ngram"), "ngram"),
        ("eagle:models/a", DraftOptions(kind="eagle", model="models/a"), "a"),
        ("model:owner/b+ngram", DraftOptions(kind="model", model="owner/b", ngram=True), "b+ngram"),
    ],
)
def test_drafts_are_named_on_the_command_line(text, draft, label):
    assert parse_draft(text) == draft
    assert draft_label(draft) == label


def test_two_drafts_of_one_name_are_refused():
    """Their figures could not be told apart."""
    with pytest.raises(ValueError, match="two drafts have the same name"):
        label_drafts([parse_draft("eagle:x/head"), parse_draft("eagle:y/head")])


def test_a_study_changes_one_thing_at_a_time():
    """And leaves out what the configuration has already."""
    cache = CacheOptions(refresh_every=4)
    base, *changed = study_choices(cache, 256, 30)
    assert base.options == CacheOptions(refresh_every=4, top_k_chunks=8, score_layers=(29,))
    assert [choice.study for choice in changed] == [
        "layer 15",
        "layers 7, 15, 22, 29",
        "refresh: every 1",
    ]
    assert all(choice.tokens == 256 for choice in (base, *changed))
    assert "layer 29" in [choice.study for choice in study_choices(CacheOptions(score_layers=(18,)), 256, 30)]


def test_budgets_are_counted_in_tokens():
    """Policy full has none."""
    choices = main_choices(CacheOptions(), ["full", "streaming", "retrieval"], [256, 1024])
    found = [(choice.options.policy, choice.tokens) for choice in choices]
    assert found == [("full", None), ("streaming", 256), ("streaming", 1024), ("retrieval", 256), ("retrieval", 1024)]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kinds", "quotes"], "a kind must be one of govreport, pg19, passkey, needles, quote, got 'quotes'"),
        (["--policies", "full,some"], "a policy must be one of full, streaming, retrieval, got 'some'"),
        (["--cache-tokens", "250"], "cache tokens must be a multiple of cache.chunk_size (16), got 250"),
        (["--cache-tokens", "32"], "cache.top_k_chunks is 2"),
        (["--lengths", "100"], "a length must be 512 tokens or more"),
        (["--lengths", "100000"], "the target holds"),
        (["--per-length", "0"], "per_length must be at least 1"),
        (["--drafts", "head"], "a draft must be ngram, eagle:FOLDER[+ngram] or model:NAME[+ngram], got 'head'"),
        (["--drafts", "eagle:nowhere"], "nowhere"),
        (["--study", "nobody"], "--study must be one of"),
        (["--set", "cache.score_layers=[40]"], "cache.score_layers names layer 40, but the target has"),
        (["--examples", "nowhere"], "nowhere"),
    ],
)
def test_what_cannot_be_is_one_line_and_exit_code_2(arguments, message, capsys):
    """Before a model is loaded: a study takes minutes."""
    assert main([*SMALL, *arguments]) == 2
    err = capsys.readouterr().err
    assert "loading" not in err
    last = err.splitlines()[-1]
    assert last.startswith("error: ")
    assert message in last


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_default_pair_repeats_what_it_is_asked_for():
    """SmolLM2 quotes a passage word for word, copies find it, and a head sees it where it is in view."""
    config = RunConfig.load(Path("configs/smollm2.yaml"), [])
    options = RetrievalOptions(
        kinds=("quote", "passkey"), lengths=(1024,), per_length=1, cache_tokens=(256,), max_new_tokens=32, study="none"
    )
    result = retrieval(config, options, lambda line: None)
    by_draft = {cell["draft"]: cell for cell in result["cells"] if (cell["kind"], cell["policy"]) == ("quote", "full")}
    assert all(each["target_agreement"] > 0.7 for each in result["documents"])
    assert by_draft["ngram"]["categories"]["needle"]["accepted"]["mean"] > 0.5
    assert result["studies"] == []
    views = {cell["policy"]: cell["categories"]["needle"]["visible"]["mean"] for cell in result["cells"]}
    assert views["full"] == 1.0
    assert result["config"]["draft"]["model"] == "models/smollm2-135m-eagle"
