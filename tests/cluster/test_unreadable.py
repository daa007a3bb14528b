"""What a worker could not read, and whose fault it is."""

import pyarrow as pa
import pyarrow.parquet as pq

from specextend.cluster.driver import is_damaged_row
from specextend.core import DocumentKey
from specextend.data import source as source_module
from specextend.data.inputs import InputOptions
from specextend.data.source import open_source


def test_a_file_that_does_not_open_makes_no_error_rows(tmp_path, monkeypatch):
    """S3 whose key was taken away answers HEAD and not GET: that is no fault of a hundred thousand documents."""

    def denied(*arguments):
        raise PermissionError("access denied")

    pq.write_table(pa.table({"text": ["one", "two", "three"]}), tmp_path / "a.parquet")
    source = open_source(InputOptions(path=str(tmp_path)))
    monkeypatch.setattr(source_module, "open_parquet", denied)
    assert not any(is_damaged_row(source, DocumentKey(0, row)) for row in range(3))
