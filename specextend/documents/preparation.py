"""The command `specextend prepare documents`: files become a data set.

Another call reads only new, changed and failed files.
"""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import PurePath

from specextend.core import Values, counted
from specextend.data.inputs import InputError
from specextend.data.listing import (
    ERRORS,
    GONE,
    LEFT_OUT,
    PARQUET,
    Failure,
    FoundFile,
    each_once,
    find,
    is_hidden,
    read_errors,
)
from specextend.data.storage import (
    Location,
    is_uri,
    remove_temporary_files,
    resolve,
    write_bytes,
)
from specextend.documents.document_set import (
    COUNTS,
    known_files,
    new_part,
    settle,
    write_rows,
)
from specextend.documents.file_readers import (
    OTHER,
    Reading,
    SourceFile,
    check_reader,
    kind_of,
    read_files,
    read_table,
)
from specextend.documents.table_rows import NumberedRow
from specextend.documents.text import DocumentOptions, UnreadableError

_AS_IT_IS = (
    "is Parquet, which specextend run reads as it is: specextend init FILE writes its configuration"
)
_OTHER_KIND = (
    "is of a kind that is not read; --pattern takes it if it is text, --reader if a function of "
    "yours reads it"
)
_HIDDEN = (".", "~$")
"""Hidden names, and temporary files of Word."""
_PART_BYTES = 64 << 20
_COMMIT_S = 60
"""Seconds of reading that may be lost."""


@dataclass(frozen=True)
class Prepared:
    """Result of a call."""

    num_documents: int
    num_read: int
    num_failed: int
    """Files without a document."""
    num_unchanged: int
    num_waiting: int
    failures: list[Failure]
    """Failures by file, then files that were left out or are gone."""
    counts: Mapping[str, int]
    """Sums of `COUNTS` of new documents."""

    @property
    def has_failed(self) -> bool:
        """Return True if a wanted file is not in the data set."""
        return any(failure.reason not in (LEFT_OUT, GONE) for failure in self.failures)

    def summary(self, output: str) -> str:
        """Return a line about the call."""
        said = [f"{counted(self.num_documents, 'document')} in {output}"]
        if self.num_unchanged or self.num_waiting:
            waiting = f", {self.num_waiting:,} left to the next call" if self.num_waiting else ""
            failed = f", {self.num_failed:,} failed" if self.num_failed else ""
            said.append(
                f"{counted(self.num_read, 'file')} read{failed}, {self.num_unchanged:,} "
                f"unchanged{waiting}"
            )
        said += [
            f"{name.replace('_', ' ')}: {count:,}" for name, count in self.counts.items() if count
        ]
        if self.failures:
            counts = Counter(failure.reason for failure in self.failures).most_common()
            said.append(
                ", ".join(f"{reason}: {count:,}" for reason, count in counts)
                + f" (see {output}/{ERRORS})"
            )
        return "; ".join(said)


def prepare_documents(
    sources: Sequence[str],
    output: str,
    options: DocumentOptions,
    on_progress: Callable[[int, int], None],
) -> Prepared:
    """Bring a data set up to date with files, folders and globs, local or URIs.

    `on_progress` receives the numbers of read and of all files.

    Raises:
        InputError: There is no file, `output` is no data set, or a package is missing.
    """
    folder = _open(output)
    known = known_files(folder)
    files, failures = find_files(sources, options, folder)
    listed = {file.path for file in files}
    named = [failure for failure in read_errors(folder) if failure.reason != LEFT_OUT]
    failed = {failure.path for failure in named}
    new = [
        file
        for file in files
        if file.path in failed or known.get(file.path) != (file.size, file.modified)
    ]
    todo = new[: options.limit]
    paths = {file.path for file in todo}
    failures += [failure for failure in named if failure.path in listed - paths]
    if options.reader is not None:
        check_reader(folder, options)
    gone = known.keys() - listed
    message = (
        "is not found this time; its documents "
        f"{'are removed' if options.remove_gone else 'stay (--remove-gone)'}"
    )
    failures += [Failure(path, None, GONE, message) for path in gone]
    if not options.remove_gone:
        failures += [_remember(failure) for failure in named if failure.path not in listed | gone]
    stale = known.keys() & paths | (gone if options.remove_gone else set())
    if stale:
        settle(folder, stale)
    with closing(read_files(todo, folder, options)) as readings:
        num_documents, counts = _add(
            folder, readings, failures, lambda done: on_progress(done, len(todo))
        )
    num_failed = len(paths - known_files(folder).keys())
    num_unchanged = len(files) - len(new)
    num_waiting = len(new) - len(todo)
    num_read = len(todo) - num_failed
    return Prepared(
        num_documents, num_read, num_failed, num_unchanged, num_waiting, failures, counts
    )


def _remember(failure: Failure) -> Failure:
    if failure.reason == GONE:
        return failure
    return failure._replace(
        reason=GONE,
        message=f"is not found this time; an earlier call said that it {failure.message}",
    )


def prepare_rows(
    name: str, lines: Iterable[NumberedRow], output: str, options: DocumentOptions
) -> Prepared:
    """Replace rows of the same name in a data set. Raises InputError if all are bad."""
    folder = _open(output)
    failures = [failure for failure in read_errors(folder) if failure.path != name]
    try:
        reading = read_table(
            SourceFile(folder, name, name, "", 0, datetime.now(UTC)), lines, folder, options
        )
    except UnreadableError as error:
        raise InputError(f"{name} {error}") from error
    settle(folder, {name})
    num_documents, counts = _add(folder, [reading], failures, lambda done: None)
    return Prepared(num_documents, 1, 0, 0, 0, failures, counts)


def _open(output: str) -> Location:
    folder = resolve(output)
    if folder.info.is_file:
        raise InputError(f"{output} is a file; name a folder for the data set")
    remove_temporary_files(folder)
    return folder


def find_files(
    sources: Sequence[str], options: DocumentOptions, output: Location
) -> tuple[list[SourceFile], list[Failure]]:
    """Return the files by path, and the files left out by name.

    The id is the path below the source, or the whole path with several sources.
    """
    found: dict[str, SourceFile] = {}
    others: dict[str, Failure] = {}
    for source in sources:
        root, pattern, files = _list(source)
        written = "/".join(source.rstrip("/").split("/")[: -len(pattern) or None]).removeprefix(
            "./"
        )
        for file in files:
            relative = file.relative_path
            location = root.child(relative)
            path = (
                f"{source.partition('://')[0]}://{location.path}"
                if is_uri(source)
                else location.path
            )
            if f"{location.path}/".startswith(f"{output.path}/"):
                continue
            kind = _kind(path, relative, pattern == (relative,), options)
            if isinstance(kind, Failure):
                others[path] = kind
                continue
            doc_id = relative if len(sources) == 1 or not written else f"{written}/{relative}"
            modified = datetime.fromtimestamp(0, UTC) + timedelta(
                microseconds=file.modified_ns // 1000
            )
            found.setdefault(path, SourceFile(location, path, doc_id, kind, file.size, modified))
    if not found:
        why = {failure.message: f"; {name} {failure.message}" for name, failure in others.items()}
        raise InputError(f"there is no file to read in {', '.join(sources)}{''.join(why.values())}")
    return sorted(found.values(), key=lambda file: file.path), list(others.values())


def _kind(path: str, relative: str, is_named: bool, options: DocumentOptions) -> str | Failure:
    if any("\udc80" <= character <= "\udcff" for character in path):
        return Failure(
            path, None, "bad name", "has a name that is not UTF-8, which cannot be an id; rename it"
        )
    if relative.lower().endswith(PARQUET):
        if is_named:
            raise InputError(f"{path} {_AS_IT_IS}")
        return Failure(path, None, LEFT_OUT, _AS_IT_IS)
    is_wanted = is_named or any(PurePath(relative).match(pattern) for pattern in options.patterns)
    if options.patterns and not is_wanted:
        return Failure(path, None, LEFT_OUT, "has a name that no pattern matches")
    kind = kind_of(relative)
    if kind is None and options.reader:
        kind = OTHER
    elif kind is None and is_wanted:
        kind = "text"
    return kind or Failure(path, None, LEFT_OUT, _OTHER_KIND)


def _list(source: str) -> tuple[Location, tuple[str, ...], list[FoundFile]]:
    """Return folder, pattern and files of a source; hidden files need their full name."""
    found = find(resolve(source), _HIDDEN)
    if found is None:
        raise InputError(f"{source} does not exist; give a file, a folder or a glob")
    root, pattern, files, _ = found
    wanted = (
        file
        for file in files
        if pattern == (file.relative_path,) or not is_hidden(file.relative_path, _HIDDEN)
    )
    return root, pattern, each_once(wanted)


def _write_errors(folder: Location, failures: Iterable[Failure]) -> None:
    lines = (json.dumps(failure._asdict(), ensure_ascii=False) + "\n" for failure in failures)
    write_bytes(folder.child(ERRORS), "".join(lines).encode("utf-8", "backslashreplace"))


def _add(
    folder: Location,
    readings: Iterable[Reading],
    failures: list[Failure],
    on_progress: Callable[[int], None],
) -> tuple[int, Counter[str]]:
    rows: list[Values] = []
    counts: Counter[str] = Counter()
    num_bytes = 0
    since = time.monotonic()
    try:
        for done, reading in enumerate(readings, start=1):
            failures += reading.failures
            for row in reading.rows:
                rows.append(row)
                num_bytes += len(row["text"])
                counts.update({name: row.get(name, 0) for name in COUNTS})
            # failures first: rows without them would look complete
            if reading.pending is not None:
                _write_errors(folder, failures)
                folder.filesystem.move(folder.child(reading.pending).path, new_part(folder).path)
            if num_bytes >= _PART_BYTES or time.monotonic() - since > _COMMIT_S:
                write_rows(rows, new_part(folder))
                rows = []
                num_bytes = 0
                since = time.monotonic()
            on_progress(done)
    finally:  # also after an interruption
        write_rows(rows, new_part(folder))
    num_documents, repeated = settle(folder)
    failures += repeated
    failures.sort(
        key=lambda failure: (failure.reason in (LEFT_OUT, GONE), failure.path, failure.row or 0)
    )
    _write_errors(folder, failures)
    return num_documents, counts
