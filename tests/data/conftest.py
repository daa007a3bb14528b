"""Inputs on disk and an in-memory tokenizer."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from specextend.core import DocumentKey
from specextend.data.commits import CommitWriter
from specextend.data.inputs import DocumentError, InputError, InputOptions
from specextend.data.source import open_source
from specextend.data.storage import resolve
from tests.data.s3_server import s3_server
from tests.properties.rows import done

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def opened(path, **options):
    """The input at a path."""
    return open_source(InputOptions(path=str(path), **options))


def row_of(source, row, file=0):
    """A row as a worker reads it."""
    return source.read(DocumentKey(file, row))


def input_error(said):
    """The block refuses the input in these words."""
    return pytest.raises(InputError, match=said)


def row_error(said):
    """The block makes an error row with these words."""
    return pytest.raises(DocumentError, match=said)


def location(path):
    """A place on this machine."""
    return resolve(str(path))


def commit_all(source, output):
    """Commit every row of an input as done."""
    CommitWriter(output, "0000000a").commit([done(row.key) for row in source.scan()])


@pytest.fixture
def write(tmp_path):
    """Write columns as `<tmp_path>/<name>`, in row groups of `group_rows`."""

    def write(name, columns, group_rows=2):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(pa.table(columns), path, row_group_size=group_rows)
        return path

    return write


@pytest.fixture(scope="session")
def server():
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3(server, monkeypatch):
    """An empty bucket, and the environment in which a client finds it."""
    for name, value in server.environment.items():
        monkeypatch.setenv(name, value)
    server.empty()
    return server


@pytest.fixture
def output(tmp_path):
    return location(tmp_path / "output")


@pytest.fixture(scope="session")
def plain_tokenizer():
    """One token a byte, with control tokens of both kinds: special ones, and an added one that is not special."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={symbol: i for i, symbol in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in ("<|bos|>", "<|im_start|>", "<|im_end|>")])
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("  ", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")


@pytest.fixture(scope="session")
def chat_tokenizer(plain_tokenizer):
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=plain_tokenizer.backend_tokenizer, bos_token="<|bos|>", eos_token="<|im_end|>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
