"""Outputs of earlier runs, whose rows need not be done again."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import fs

from specextend.core import one_line
from specextend.data.fingerprint import num_input_rows, other_configuration, read_manifest
from specextend.data.in_order import in_order
from specextend.data.inputs import InputError, InputFile
from specextend.data.parquet import DAMAGED, is_damaged
from specextend.data.run_folder import list_results, summaries_folder
from specextend.data.storage import Location, resolve

_DONE_SCHEMA = pa.schema([("doc_id", pa.large_string()), ("content_sha256", pa.large_string())])


@dataclass(frozen=True, slots=True)
class EarlierOutput:
    """The output of an earlier run whose rows this run could have made."""

    location: Location
    manifest: Mapping[str, Any]

    def done_rows(self) -> pa.Table:
        """Read `doc_id` and `content_sha256` of its summaries; the latter is null in those of older versions."""
        tables = in_order(self._read, list_results(summaries_folder(self.location)))
        return pa.concat_tables([_DONE_SCHEMA.empty_table(), *tables])

    def holds(self, file: InputFile) -> bool:
        """Return True if it was made from this very file: same path, size, footer and time of the last write."""
        before = self.manifest["identity"]["files"].get(file.relative_path)
        now = {"size": file.size, "rows": file.num_rows, "footer_sha256": file.footer_sha256}
        times = self.manifest.get("modified_ns", {})
        return before == now and file.modified_ns is not None and times.get(file.relative_path) == file.modified_ns

    def _read(self, name: str) -> pa.Table:
        location = summaries_folder(self.location).child(name)
        try:
            with location.filesystem.open_input_file(location.path) as file, pq.ParquetFile(file) as parquet:
                names = [field.name for field in _DONE_SCHEMA if field.name in parquet.schema_arrow.names]
                table = parquet.read(columns=names)
                missing = pa.nulls(len(table), pa.large_string())
                columns = [table[name] if name in names else missing for name in _DONE_SCHEMA.names]
                return pa.table(columns, names=_DONE_SCHEMA.names).cast(_DONE_SCHEMA)
        except DAMAGED as error:
            if not is_damaged(location, error):
                raise
            why = f"{location.path} is damaged ({one_line(error)})"
            raise InputError(f"{why}; repair it, or leave it out of input.except_done_in") from error


def find_earlier(
    paths: Sequence[str],
    own: Location,
    manifest: Mapping[str, Any],
    checkpoint: Callable[[], object] = lambda: None,
) -> tuple[list[EarlierOutput], tuple[str, ...]]:
    """Find the outputs of `input.except_done_in` whose rows count as done; return notes about the others, too.

    own: this run's output folder, which is passed over. manifest: of this run before its rows are selected; an output
    of another configuration has done nothing that this run would do. Raises InputError for a path without wildcards
    that is no output folder.
    """
    found: list[EarlierOutput] = []
    left_out: dict[str, list[Location]] = {}
    for path in paths:
        for location, is_named in _folders(path):
            checkpoint()
            if location == own or any(location == each.location for each in found):
                continue
            recorded = _read(location, is_named)
            if recorded is None or not num_input_rows(recorded):
                continue
            if reason := _why_not(location, recorded, manifest):
                left_out.setdefault(reason, []).append(location)
            else:
                found.append(EarlierOutput(location, recorded))
    return found, tuple(f"not counted as done: rows of {_say(each)}{reason}" for reason, each in left_out.items())


def _why_not(location: Location, recorded: Mapping[str, Any], manifest: Mapping[str, Any]) -> str | None:
    """Return why an output has done nothing that this run would do; None if it may have."""
    if lines := other_configuration(recorded, manifest):
        return f", of another configuration: {lines[0]}"
    return None if list_results(summaries_folder(location)) else ", which is not finished"


def _say(locations: Sequence[Location]) -> str:
    first, last = locations[0], locations[-1]
    return first.path if first == last else f"{len(locations)} outputs ({first.path} to {last.name})"


def _read(location: Location, is_named: bool) -> dict[str, Any] | None:
    try:
        manifest = read_manifest(location)
    except ValueError as error:
        raise InputError(f"input.except_done_in: {error}") from error
    if manifest is None and is_named:
        raise InputError(f"input.except_done_in: {location.path} is no output folder; name one, or a glob of them")
    return manifest


def _folders(path: str) -> list[tuple[Location, bool]]:
    """Return the folder of a path, or the folders that match a glob, in order, and whether the path names one."""
    location = resolve(path)
    parts = location.path.split("/")
    first = next((i for i, part in enumerate(parts) if any(each in part for each in "*?[")), None)
    if first is None:
        return [(location, True)]
    found = [Location(location.filesystem, "/".join(parts[:first]) or "/")]
    for pattern in parts[first:]:
        if pattern == "**":
            raise InputError(f"input.except_done_in {path}: `**` is not supported; give one `*` for each folder")
        found = [child for folder in found for child in _matching(folder, pattern)]
    return [(each, False) for each in found]


def _matching(folder: Location, pattern: str) -> list[Location]:
    """Return the folders in a folder whose names match."""
    infos = folder.filesystem.get_file_info(fs.FileSelector(folder.path, allow_not_found=True))
    names = sorted(info.base_name for info in infos if info.type == fs.FileType.Directory)
    return [folder.child(name) for name in names if fnmatch.fnmatchcase(name, pattern) and not name.startswith(".")]
