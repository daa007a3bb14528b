"""Headers and hashes of weight files."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import save_file

from specextend.model_files import TensorInfo, read_safetensors_header


def header(text: str) -> bytes:
    """A safetensors file without a tensor's bytes."""
    return len(text).to_bytes(8, "little") + text.encode()


def test_a_header_names_tensors_with_type_and_shape(tmp_path):
    """What a format check needs, without a byte of weights."""
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(2, 3, dtype=torch.bfloat16), "b": torch.zeros(3)}, file, metadata={"format": "pt"})
    assert read_safetensors_header(file) == {"w": TensorInfo("BF16", (2, 3)), "b": TensorInfo("F32", (3,))}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 64,
        header('{"a": {"dtype": "F32", "shape": [], "data_offsets": [0, "x"]}}'),
        header('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}"),
    ],
    ids=["empty", "endless header", "no offset", "deep"],
)
def test_what_is_no_safetensors_file_is_said_in_one_line(tmp_path, content):
    """A pickle renamed, an error page saved as a model."""
    file = tmp_path / "a.safetensors"
    file.write_bytes(content)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_safetensors_header(file)


@pytest.mark.parametrize("change", [lambda raw: raw[:-1], lambda raw: raw + b"\0"], ids=["one less", "one more"])
def test_a_file_of_another_length_than_promised_is_refused(tmp_path, change):
    """An interrupted download has a whole header."""
    file = tmp_path / "a.safetensors"
    save_file({"w": torch.zeros(8)}, file)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(ValueError, match=r"is cut short: its header promises \d+ bytes"):
        read_safetensors_header(file)
