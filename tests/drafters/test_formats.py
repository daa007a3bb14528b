"""What the folder of a head is told, before a tensor is loaded or a document touched."""

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from specextend.cli.command import call
from specextend.cli.prepare import prepare
from specextend.decoding.decoding_options import DraftOptions
from specextend.drafters.formats import convert_head, read_head
from specextend.models.causal_lm import TargetOptions
from specextend.models.model_files import ModelError
from specextend.models.pairing import check_pair, describe_features, pair_hashes
from tests.models.conftest import edit_json, edit_tensors
from tests.published_heads import WRITERS
from tests.refused import refused
from tests.tables import cases
from tests.tiny_models import FAMILIES, tiny_model, write_eagle, write_model

ALL = {"ours": lambda folder, model: write_eagle(folder, model, draft_vocab_size=3), **WRITERS}
NAMES = dict(
    cases("""
        ours -> specextend-eagle
        eagle1 -> EAGLE-1/2
        eagle1-biased -> EAGLE-1/2
        eagle3 -> EAGLE-3
        eagle3-narrow -> EAGLE-3
        eagle31 -> EAGLE-3
        eagle3-nested -> EAGLE-3
        speculators-eagle -> speculators eagle
        speculators-eagle3 -> speculators eagle3
    """)
)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """Three layers, 48 wide, 120 tokens."""
    return write_model(tiny_model(FAMILIES["llama"], 0), tmp_path_factory.mktemp("formats") / "target")


@pytest.fixture
def write(tmp_path):
    """A head's folder; keywords go into its config, None removes a key."""

    def write(variant, **values):
        ALL[variant](tmp_path / "head", tiny_model(FAMILIES["llama"], 0))
        edit_json(tmp_path / "head" / "config.json", **values)
        return tmp_path / "head"

    return write


def pair_of(target, head):
    return TargetOptions(model=target), DraftOptions(kind="eagle", model=str(head))


def refusal(target, head):
    """What a user reads; it must be one line."""
    return refused(check_pair, *pair_of(target, head), kind=ModelError)


@pytest.mark.parametrize("variant", ALL)
def test_each_format_is_known_by_its_files(variant, write, target):
    """No option says which it is; the user has a folder from the Hub."""
    folder = write(variant)
    head = read_head(folder)
    assert head.format == NAMES[variant]
    assert head.hidden_layers(3) == ((0, 1, 2) if head.fused else ())
    assert check_pair(*pair_of(target, folder)).num_layers == 3
    assert "draft" in pair_hashes(*pair_of(target, folder))


@pytest.mark.parametrize(
    "values, layers, why",
    cases("""
        eagle_config: null -> 1, 15, 28 -> its config.json names none, and these are usual
        {eagle_config: null, eagle_aux_hidden_state_layer_ids: [2, 16, 29]} -> 1, 15, 28
            -> its ids 2, 16, 29 number layers by their inputs (these are usual)
        eagle_config: {eagle_aux_hidden_state_layer_ids: [2, 16, 29]} -> 1, 15, 28
            -> by their inputs (these are usual)
        {eagle_config: null, eagle_aux_hidden_state_layer_ids: [1, 15, 28]} -> 1, 15, 28
            -> by their outputs (these are usual)
        eagle_config: {eagle_aux_hidden_state_layer_ids: [20, 26, 32]} -> 19, 25, 31
            -> by their inputs (32 is no output)
        eagle_config: {eagle_aux_hidden_state_layer_ids: [2, 15, 28]} -> 2, 15, 28
            -> by their outputs (a guess; the other is draft.feature_layers [1, 14, 27])
        {eagle_config: null, eagle_aux_hidden_state_layer_ids: [2, 15, 28]} -> 1, 14, 27
            -> by their inputs (a guess; the other is draft.feature_layers [2, 15, 28])
        {speculators_model_type: eagle3, eagle_aux_hidden_state_layer_ids: [1, 15, 28]} -> 0, 14, 27
            -> inputs (as speculators does)
    """),
)
def test_the_layers_are_those_that_the_head_was_trained_with(values, layers, why, write):
    """Heads are published with two meanings of one key; what is a guess says so, and a key has the last word."""
    folder = write("eagle3", **yaml.safe_load(values))
    assert read_head(folder).hidden_layers(32) == tuple(map(int, layers.split(", ")))
    [line] = describe_features(DraftOptions(kind="eagle", model=str(folder)), 32)
    assert f"takes the outputs of the target's layers {layers} (of 32, from 0): " in line
    assert line.endswith(why)
    assert read_head(folder).hidden_layers(32, (3, 4, 5)) == (3, 4, 5)


@pytest.mark.parametrize("variant, layers", [("eagle3", (0, 1)), ("eagle1", (1,))])
def test_chosen_layers_must_be_as_many_as_the_head_takes(variant, layers, write, target):
    """A head of another size would fail inside the first prompt; one that takes none would ignore them."""
    options, draft = pair_of(target, write(variant))
    message = refused(check_pair, options, replace(draft, feature_layers=layers), kind=ModelError)
    assert f"takes the outputs of layers {', '.join(map(str, layers))}, counted from 0; the target has 3" in message


@pytest.mark.parametrize(
    "values, message",
    cases("""
        eagle_config: null -> takes the outputs of layers 1, 0, -1, counted from 0; the target has 3 layers
        eagle_aux_hidden_state_layer_ids: [2, 1, 3] -> outputs of layers 1, 0, 2, counted from 0
        hidden_size: 64 -> fc.weight is [48, 144], config.json says [64, 192]
        num_hidden_layers: 2 -> num_hidden_layers: Input should be 1, got 2
        model_type: gemma3 -> model_type: Input should be 'llama', 'mistral', 'qwen2' or 'qwen3', got 'gemma3'
        rope_scaling: {rope_type: longrope, long_factor: [2, 2, 2, 2, 2, 2], short_factor: [1, 1, 1, 1, 1, 1]}
            -> has RoPE type 'longrope', which is not served here
        vocab_size: 121 -> t2d is [120], config.json says [121]
        target_hidden_size: 32 -> (EAGLE-3) lacks the tensor embed_tokens.weight
        fc_norm: true -> (EAGLE-3) lacks the tensor fc_norm.0.weight
        {fc_norm: true, norm_before_fc: true} -> fc_norm is 'True beside norm_before_fc', which may change what
        logit_scale: 0.5 -> config.json: logit_scale is 0.5, which may change what the head computes, and is not
        invented_tomorrow: 2 -> invented_tomorrow is 2, which may change
        eagle_config: {use_last_layernorm: false} -> use_last_layernorm is False, which may change
        eagle_config: {mask_hidden: true} -> mask_hidden is True, which may change
        layer_types: [sliding_attention] -> layer_types is 'sliding_attention without sliding_window', which
        {layer_types: [sliding_attention, full_attention], sliding_window: 64} -> layer_types is ['sliding_
        sliding_window: 64 -> sliding_window is '64 without layer_types', which may change
    """),
)
def test_a_config_that_is_not_served_says_why(values, message, write, target):
    """Each would run, or fail deep inside the first document."""
    assert message in refusal(target, write("eagle3", **yaml.safe_load(values)))


@pytest.mark.parametrize(
    "variant, change, message",
    [
        ("eagle3", {"fc.weight": torch.zeros(48, 96)}, "(EAGLE-3): fc.weight is [48, 96], config.json says [48, 144]"),
        ("eagle3", {"d2t": torch.full((60,), 61)}, "60 different token ids below 120; it leads to 60, from 61 to 120"),
        (
            "eagle3",
            {"fc.weight": torch.zeros(48, 144).to(torch.float8_e4m3fn)},
            "fc.weight is F8_E4M3; served are BF16",
        ),
        (
            "eagle3",
            {"medusa.weight": torch.zeros(2)},
            "(EAGLE-3) has the tensor medusa.weight, which config.json does not describe",
        ),
        ("eagle3", {"model.fc.weight": torch.zeros(48, 144)}, "twice, also as"),
        ("ours", {"draft_token_ids": torch.tensor([3, 2, 1])}, "draft_token_ids must be ascending ids from 0 to 119"),
        ("ours", {"draft_token_ids": torch.tensor([1, 2, 120])}, "draft_token_ids must be ascending ids from 0 to 119"),
        (
            "ours",
            {"fc.bias": torch.zeros(48)},
            "(specextend-eagle) has the tensor fc.bias, which config.json does not describe",
        ),
        ("eagle1", {"fc.weight": None}, "in no known format; known are specextend-eagle (our own), EAGLE-1/2 and"),
        ("speculators-eagle", {"fusion_fc.bias": None}, "(speculators eagle) lacks the tensor fc.bias"),
    ],
)
def test_tensors_that_the_format_does_not_have_are_refused(variant, change, message, write, target):
    """A tensor more or less is another network than the one we compute."""
    folder = write(variant)
    edit_tensors(folder, change)
    assert message in refusal(target, folder)


@pytest.mark.parametrize(
    "values",
    [
        "{sliding_window: 64, use_sliding_window: false, max_window_layers: 1}",
        "{sliding_window: 4096, layer_types: [full_attention]}",
        "{sliding_window: 2048}",
        "{logit_scale: 1.0, attention_bias: true, use_mtp_layernorm: false, invented_tomorrow: null}",
    ],
)
def test_what_changes_nothing_is_passed_over(values, write, target):
    """Published files are full of such keys, and of tensors that training left: rotary frequencies, masks."""
    folder = write("eagle3", **yaml.safe_load(values))
    edit_tensors(folder, {"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(6), "mask": torch.ones(2)})
    assert check_pair(*pair_of(target, folder))


def test_a_head_of_another_target_is_refused(write, tmp_path):
    """Its ids would be other tokens."""
    other = write_model(tiny_model(FAMILIES["llama"], 0, vocab_size=130), tmp_path / "other")
    assert "120, the target's is 130" in refusal(other, write("eagle3"))


def test_a_whole_model_is_told_from_a_head(target):
    """The commonest slip: the right folder, the wrong kind."""
    message = refusal(target, Path(target))
    assert "in no known format; known are specextend-eagle (our own), EAGLE-1/2 and EAGLE-3 (SafeAILab)" in message
    assert message.endswith("this looks like a whole model: draft.kind model")


def test_missing_files_are_named(write, target):
    """A folder copied in part."""
    folder = write("eagle3")
    (folder / "model.safetensors").unlink()
    assert "must have weights as safetensors; convert a pickle with: specextend prepare draft" in refusal(
        target, folder
    )
    (folder / "config.json").unlink()
    assert "has no config.json" in refusal(target, folder)


def pickled(folder, content=None):
    """A head as most of SafeAILab's are published: as pytorch_model.bin alone."""
    weights = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    torch.save(content or weights, folder / "pytorch_model.bin")
    return weights


def test_a_pickled_head_is_refused_with_the_conversion_that_works(write, target, monkeypatch, capsys):
    """In a folder, and by its name on the Hub."""
    folder = write("eagle3")
    weights = pickled(folder)
    monkeypatch.chdir(folder.parent)
    command = refusal(target, folder).partition("convert a pickle with: specextend prepare ")[2]
    assert call(prepare, shlex.split(command), "prepare") == 0
    assert capsys.readouterr().out.startswith("EAGLE-3 head in FOLDER; give specextend run: --set draft.kind=eagle")
    assert set(load_file("FOLDER/model.safetensors")) == set(weights)
    assert Path("FOLDER/config.json").read_bytes() == (folder / "config.json").read_bytes()
    check_pair(*pair_of(target, "FOLDER"))
    with pytest.raises(ModelError, match="FOLDER holds something already"):
        convert_head(str(folder), Path("FOLDER"))


def test_a_head_of_the_hub_is_taken_by_its_name(write, target, hub, tmp_path):
    """As a target is: resolved to a commit, which identifies it; as pickles it is converted from there, too."""
    folder = write("eagle3")
    commit = hub.push("owner/head", folder)
    pair = pair_of(target, f"owner/head@{commit}")
    check_pair(*pair)
    assert pair_hashes(*pair)["draft"] == commit
    pickled(folder)
    hub.push("owner/pickled", folder)
    assert "prepare draft owner/pickled --output FOLDER" in refusal(target, "owner/pickled")
    assert "pytorch_model.bin" not in hub.fetched
    assert convert_head("owner/pickled@main", tmp_path / "made") == "EAGLE-3"


@pytest.mark.parametrize("content", [Path("code"), {"fc.weight": torch.ones(1)}])
def test_what_is_no_head_becomes_no_folder(content, write, tmp_path):
    """Code in a pickle is not run, and a folder that is there is whole."""
    folder = write("eagle3")
    pickled(folder, content)
    said = refused(convert_head, str(folder), tmp_path / "made", kind=ModelError)
    assert "cannot be read as nothing but tensors" in said or "is in no known format" in said
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
