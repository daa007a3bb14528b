"""What makes two starts the same run."""

import json
import shutil

import pytest

from specextend.core import Values
from specextend.data.fingerprint import build_manifest, differences, read_manifest, write_manifest
from tests.data.conftest import opened

HASHES = {"target": "a" * 64, "draft": "b" * 64, "tokenizer": "c" * 64}
CONFIG: Values = {
    "input": {"path": "in", "text_column": "text", "passthrough": ["n"]},
    "output": {"path": "out"},
    "target": {"model": "here/target", "dtype": "bfloat16"},
    "draft": {"kind": "eagle", "model": "here/draft"},
    "decoding": {"max_batch_size": 1, "cache_gib": 2.0, "temperature": 0.7},
    "attention": {"backend": "auto"},
    "tree": {"nodes": 16},
    "job": {"workers": 1},
}


def changed(section, key, value):
    return CONFIG | {section: CONFIG[section] | {key: value}}


@pytest.fixture
def manifest(tmp_path, write):
    write("in/a.parquet", {"text": ["x", "y"]})
    write("in/sub/b.parquet", {"text": ["z"]})

    def build(config=CONFIG, hashes=HASHES, folder="in"):
        return build_manifest(opened(tmp_path / folder), config, hashes)

    return build


def test_where_things_lie_and_how_many_machines_do_them_is_not_the_run(manifest):
    where = [("input", "path", "elsewhere"), ("target", "model", "moved/target"), ("attention", "backend", "flash")]
    for section, key, value in [*where, ("decoding", "max_batch_size", 8), ("job", "workers", 64)]:
        again = manifest(changed(section, key, value))
        assert again["fingerprint"] == manifest()["fingerprint"]
        assert differences(manifest(), again) == []


def test_a_run_with_examples_is_found_again(output, manifest):
    """A manifest's keys are written in their order, those of a configuration are as somebody typed them."""
    asked = manifest(CONFIG | {"prompt": {"examples": [{"user": "a", "assistant": "b"}]}})
    write_manifest(output, asked)
    recorded = read_manifest(output)
    assert recorded is not None
    assert differences(recorded, asked) == []


def test_another_value_is_another_run_and_the_difference_is_said(manifest):
    for section, key, value, line in [
        ("tree", "nodes", 32, "tree.nodes: 16 there, 32 here"),
        ("target", "quantize", "int8", 'target.quantize: nothing there, "int8" here'),
        ("input", "passthrough", [], 'input.passthrough: ["n"] there, [] here'),
        ("tree", "more", {"a.b": {}}, "tree.more.a\\.b: nothing there, {} here"),
    ]:
        other = manifest(changed(section, key, value))
        assert other["fingerprint"] != manifest()["fingerprint"]
        assert differences(manifest(), other) == [line]
    other = manifest(hashes=HASHES | {"draft": "d" * 64})
    assert other["fingerprint"] != manifest()["fingerprint"]
    assert differences(manifest(), other) == ['weights of draft: "bbbbbbbbbbbb" there, "dddddddddddd" here']


def test_of_two_schemas_what_differs_in_them_is_said(manifest):
    """Two lines of a thousand characters hide it. Another order of fields is another run, too."""

    def of(fields):
        return manifest(changed("output", "schema", json.dumps({"type": "object", "properties": fields})))

    before, longer = of({"a": {"type": "string", "maxLength": 8}, "b": {}}), of({"a": {"type": "string"}, "b": {}})
    assert differences(before, longer) == ["output.schema.properties.a.maxLength: 8 there, nothing here"]
    turned = of({"b": {}, "a": {"type": "string"}})
    assert turned["fingerprint"] != longer["fingerprint"]
    [line] = differences(longer, turned)
    assert line.startswith("output.schema: ")


def test_a_moved_input_is_the_same_and_an_edited_one_is_not(tmp_path, write, manifest):
    before = manifest()
    shutil.copytree(tmp_path / "in", tmp_path / "moved")
    assert manifest(folder="moved")["fingerprint"] == before["fingerprint"]
    write("moved/a.parquet", {"text": ["x", "y", "more"]})
    write("moved/new.parquet", {"text": ["x"]})
    lines = differences(before, manifest(folder="moved"))
    assert [line.split(":")[0] for line in lines] == ["input file a.parquet", "input file new.parquet"]
    assert "2 rows" in lines[0]
    assert "3 rows" in lines[0]
