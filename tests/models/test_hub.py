"""Models by their names on the Hub: one commit for all, and hashes that do not depend on who computes them."""

import re

import huggingface_hub.constants
import pytest
from transformers import AutoModelForCausalLM

from specextend.decoding.decoding_options import DraftOptions
from specextend.models.causal_lm import TargetOptions
from specextend.models.model_files import HubUnreachableError, ModelError, identify, resolve_revision
from specextend.models.pairing import check_pair, pair_hashes
from tests.models.conftest import check, edit_json, load, refusal
from tests.refused import refused

NAME = "owner/target"
WEIGHTS = "model.safetensors"


def test_a_pair_is_checked_and_identified_without_its_weights(hub, write_model):
    """A head without a disk for them: of sixteen gigabytes it needs a name."""
    commits = [
        hub.push(name, folder)
        for name, folder in ((NAME, write_model("target")), ("owner/draft", write_model("draft", num_hidden_layers=1)))
    ]
    pair = TargetOptions(model=NAME), DraftOptions(kind="model", model="owner/draft")
    assert check_pair(*pair).num_layers == 2
    assert pair_hashes(*pair) == {"target": commits[0], "tokenizer": commits[0], "draft": commits[1]}
    assert {"config.json", "tokenizer.json"} <= set(hub.fetched)
    assert WEIGHTS not in hub.fetched


def test_weights_of_another_shape_are_refused_by_their_header(hub, write_model):
    """Where they are fetched, before any is loaded."""
    folder = write_model()
    edit_json(folder / "config.json", intermediate_size=64)
    hub.push(NAME, folder)
    assert " is [32, 48], config.json says [32, 64]" in refusal(NAME, read=load)


def test_a_model_fetches_what_its_index_names_alone(hub, write_model):
    """Repositories hold the same weights in several formats: of Mistral's, half of what was fetched was never read."""
    folder = write_model()
    AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="20KB")
    (folder / WEIGHTS).rename(folder / "consolidated.safetensors")
    hub.push(NAME, folder)
    check(NAME)
    load(NAME)
    assert {name for name in hub.fetched if name.endswith(".safetensors")} == {
        path.name for path in folder.glob("model-*.safetensors")
    }


def test_a_repository_of_pickles_alone_is_refused_unopened(hub, write_model):
    """With the command that fetches it for conversion."""
    folder = write_model()
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    hub.push(NAME, folder)
    assert re.search("it has none .*hf download", refusal(NAME))
    assert "pytorch_model.bin" not in hub.fetched


@pytest.mark.parametrize("way", ["down", "gone", "offline"])
def test_without_the_hub_its_cache_answers(way, hub, write_model, monkeypatch):
    """A run that has what it needs must not fail for a look that it could do without."""
    commit = hub.push(NAME, write_model())
    load(NAME)
    cut_off(hub, way, monkeypatch)
    assert resolve_revision(NAME) == commit
    assert identify(f"{NAME}@main")["weights"] == commit
    assert check(f"{NAME}@{commit}").num_layers == 2
    load(NAME)


@pytest.mark.parametrize("way", ["down", "gone"])
def test_a_hub_that_is_away_is_said_to_be_and_not_the_model(way, hub, write_model, monkeypatch):
    """The next try may succeed; a model that is not there is a mistake in the configuration."""
    hub.push(NAME, write_model())
    with pytest.raises(ModelError) as unknown:
        resolve_revision("owner/none")
    assert not isinstance(unknown.value, HubUnreachableError)
    assert re.search("owner/target@none .* cannot be fetched from the Hub", refusal(f"{NAME}@none"))
    cut_off(hub, way, monkeypatch)
    said = refused(resolve_revision, NAME, kind=HubUnreachableError)
    assert said.startswith("the Hub does not answer for owner/target, nor does its cache here: ")


def cut_off(hub, way, monkeypatch):
    """Take the Hub away: it answers with errors, nobody listens, or nobody may ask."""
    if way == "down":
        hub.is_down = True
    elif way == "gone":
        monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", "http://127.0.0.1:9")
    else:
        monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
