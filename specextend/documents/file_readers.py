"""Formats of files, their readers, and processes that read them.

A file that hangs or kills its process fails without the others.
"""

import importlib
import io
import multiprocessing
import operator
import os
import re
import resource
import secrets
import signal
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import cache, partial
from itertools import accumulate
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from pathlib import PurePath
from typing import Any, NamedTuple

import pyarrow as pa

from specextend.core import Values, one_line
from specextend.data.inputs import InputError
from specextend.data.listing import LEFT_OUT, PAGE_LABELS, PAGE_STARTS, Failure
from specextend.data.storage import (
    Location,
    is_away,
    read_again,
)
from specextend.documents.document_set import (
    write_rows,
)
from specextend.documents.html import read_html
from specextend.documents.pdf import read_pdf
from specextend.documents.table_rows import ROW_READERS, NumberedRow, as_row
from specextend.documents.text import (
    HALF_CHARACTER,
    DocumentOptions,
    Text,
    UnreadableError,
    decode,
    num_visible,
    read_markdown,
)
from specextend.documents.zipped_xml import read_docx, read_epub, read_odt, read_pptx

KINDS = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".epub": "epub",
    ".pptx": "pptx",
    ".odt": "odt",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "xhtml",
    ".xht": "xhtml",
    ".md": "markdown",
    ".markdown": "markdown",
    ".txt": "text",
    ".text": "text",
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".csv": "csv",
    ".tsv": "csv",
}
"""JSON Lines and CSV have a document in each row."""
COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".lz4": "lz4", ".zst": "zstd"}
_OTHERS = {
    b"{\\rtf": "RTF",
    b"\xd0\xcf\x11\xe0": "an old Office file",
    b"PK\3\4": "a ZIP archive",
    b"PAR1": "Parquet",
}
"""Beginnings of files that are no text."""
OTHER = "other"
"""Files that only `--reader` may read."""
_INVISIBLE = re.compile(
    "[\u00ad\u200b\u2060\ufeff]|(?<![\U0001f3f4\U000e0000-\U000e007f])[\U000e0000-\U000e007f]+"
)
"""Soft hyphens, zero-width spaces, and tags outside of flags."""
_JOINT = "\n\n"


def kind_of(name: str) -> str | None:
    """Return a file's format by its name, if known."""
    path = PurePath(name.lower())
    if path.suffix in COMPRESSIONS:
        path = PurePath(path.stem)
    return KINDS.get(path.suffix)


def read_document(
    kind: str, data: bytes, options: DocumentOptions, given: Text | None = None
) -> Values:
    """Return title, text, counts and pages as columns. Raises any error for damaged bytes."""
    title, text, counts, pages, labels = given or _READERS[kind](data, options)
    texts = [*map(_clean, pages or [text])]
    text = _JOINT.join(filter(None, texts))
    if not text.strip():
        hint = (
            ", as if it were scanned; text recognition (OCR) could add it" if kind == "pdf" else ""
        )
        if counts.get("left_out_characters"):
            hint = " but that which --main-only leaves out; read it without"
        raise UnreadableError("no text", f"has no text{hint}")
    row = {"title": " ".join(_clean(title).split()), "text": text, **counts}
    if pages:
        # a page without text begins where the next page does
        lengths = (len(each) + len(_JOINT) * bool(each) for each in texts[:-1])
        starts = accumulate(lengths, initial=0)
        row[PAGE_STARTS] = [min(start, len(text)) for start in starts]
        row[PAGE_LABELS] = [*map(_clean, labels)] or None
    return row


def _clean(text: str) -> str:
    text = _INVISIBLE.sub("", HALF_CHARACTER.sub("\ufffd", text))
    return text.replace("\0", "\ufffd")


def _read_text(data: bytes, options: DocumentOptions) -> Text:
    for sign, name in _OTHERS.items():
        if data.startswith(sign):
            message = f"is {name} and no text; save it as DOCX or PDF, or read it with --reader"
            raise UnreadableError("other kind", message)
    return Text("", decode(data, options.encoding), {})


def _read_other(data: bytes, options: DocumentOptions) -> Text:
    raise UnreadableError(
        LEFT_OUT, f"is of a kind that is not read, and {options.reader} gave None"
    )


_READERS: dict[str, Callable[[bytes, DocumentOptions], Text]] = {
    "pdf": read_pdf,
    "docx": read_docx,
    "epub": read_epub,
    "pptx": read_pptx,
    "odt": read_odt,
    "html": read_html,
    "xhtml": partial(read_html, is_xml=True),
    "markdown": read_markdown,
    OTHER: _read_other,
    "text": _read_text,
}


_AHEAD = 64
_HOPELESS = 1000
"""Bad rows after which a table without good rows is given up."""
_BUFFER = 1 << 20
"""Bytes per request to a store."""


class SourceFile(NamedTuple):
    """A file to read."""

    location: Location
    path: str
    """Absolute path or URI."""
    doc_id: str
    kind: str
    size: int
    modified: datetime


class Reading(NamedTuple):
    """Documents and failures of a file."""

    rows: tuple[Values, ...] = ()
    pending: str | None = None
    """Temporary name of a complete part."""
    failures: tuple[Failure, ...] = ()


def _read_file(
    file: SourceFile, folder: Location, options: DocumentOptions, *, is_again: bool = False
) -> Reading:
    try:
        return read_again(file.location, partial(_parse, file, folder, options), file.size)
    except UnreadableError as error:
        return _failed(file, error.reason, error.message)
    except InputError:
        raise
    except ImportError as error:
        raise InputError(
            f"{file.kind.upper()} cannot be read: {one_line(error)}; install specextend with its "
            "extra `documents`, or leave such files out (--pattern)"
        ) from error
    except MemoryError:
        return _failed(file, "too large", "needs more memory than a file may take (--memory-limit)")
    # parsers raise any error on damaged bytes
    except Exception as error:  # noqa: BLE001
        if isinstance(error, OSError) and not is_again:
            return _read_file(file, folder, options, is_again=True)
        reason = "unreachable" if is_away(error) else "damaged"
        said = one_line(error) or type(error).__name__
        return _failed(file, reason, f"cannot be read: {said}")


def _parse(
    file: SourceFile, folder: Location, options: DocumentOptions, stored: pa.NativeFile
) -> Reading:
    compression = COMPRESSIONS.get(PurePath(file.path.lower()).suffix)
    stream = pa.CompressedInputStream(stored, compression) if compression else stored
    if read_rows := ROW_READERS.get(file.kind):
        lines = read_rows(io.BufferedReader(stream, _BUFFER), options)
        return read_table(file, lines, folder, options)
    data = stream.read()
    row = read_document(file.kind, data, options, _given(file.path, data, options))
    row["title"] = row["title"] or PurePath(file.path).stem
    message = "lost more than half of its text to --main-only; look at it, or read it without"
    is_half = row.get("left_out_characters", 0) > num_visible(row["text"])
    halves = (Failure(file.path, None, LEFT_OUT, message),) if is_half else ()
    return Reading((row | {"id": file.doc_id} | _columns(file),), failures=halves)


def _given(path: str, data: bytes, options: DocumentOptions) -> Text | None:
    """Raises UnreadableError for a failure of the user's reader, InputError for a wrong type."""
    if options.reader is None:
        return None
    try:
        pages = load_reader(options.reader)(path, data)
    except MemoryError:
        raise
    except Exception as error:
        said = f"made {options.reader} fail: {type(error).__name__}: {one_line(error)}"
        raise UnreadableError("reader failed", said) from error
    if pages is None:
        return None
    if isinstance(pages, str):
        return Text("", pages.strip(), {})
    if not isinstance(pages, list) or not all(isinstance(text, str) for text in pages):
        raise InputError(
            f"{options.reader} returned {type(pages).__name__} for {path}; return a text, a list "
            "of the texts of pages, or None"
        )
    texts = [text.strip() for text in pages]
    return Text("", "", {"pages_without_text": texts.count("")}, texts)


@cache
def load_reader(name: str) -> Callable[[str, bytes], Any]:
    """Import a function, also from the current folder. Raises InputError."""
    module, _, function = name.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        found = operator.attrgetter(function)(importlib.import_module(module))
        if not callable(found):
            raise TypeError(f"{function} is no function")
        return found
    except Exception as error:
        raise InputError(
            f"--reader {name} cannot be loaded ({type(error).__name__}: {one_line(error)}); give "
            "module:function, and install what the module imports"
        ) from error


def _columns(file: SourceFile) -> Values:
    return {"source_path": file.path, "source_size": file.size, "source_modified": file.modified}


def _failed(file: SourceFile, reason: str, message: str) -> Reading:
    return Reading(failures=(Failure(file.path, None, reason, message),))


def read_table(
    file: SourceFile, lines: Iterable[NumberedRow], folder: Location, options: DocumentOptions
) -> Reading:
    """Write the rows of a table as a pending part. Raises UnreadableError for no or bad rows."""
    failures: list[Failure] = []
    pending = f".{secrets.token_hex(8)}.tmp"
    num_rows = write_rows(_good_rows(file, lines, options, failures), folder.child(pending))
    if not num_rows and not failures:
        raise UnreadableError("no text", "has no rows")
    return Reading(pending=pending if num_rows else None, failures=tuple(failures))


def _good_rows(
    file: SourceFile,
    lines: Iterable[NumberedRow],
    options: DocumentOptions,
    failures: list[Failure],
) -> Iterator[Values]:
    for number, (line, values) in enumerate(lines, start=1):
        try:
            yield as_row(values, f"{file.doc_id}:{line}", line, options) | _columns(file)
        except UnreadableError as error:
            failures.append(Failure(file.path, line, error.reason, error.message))
            if len(failures) == number == _HOPELESS:
                message = f"has no good row; one of them {error}"
                raise UnreadableError(error.reason, message) from error


class _Reader:
    """A process that reads files, and is replaced when it hangs or ends."""

    def __init__(self, folder: Location, options: DocumentOptions):
        self._folder = folder
        self._options = options
        self._process: SpawnProcess | None = None

    def read(self, file: SourceFile) -> Reading:
        try:
            if self._process is None:
                self.start()
            self._connection.send(file)
            if self._connection.poll(self._options.time_limit_s + file.size / (1 << 20)):
                return self._answer()
            reason = "too slow"
            message = "was not read in the time that a file may take (--time-limit)"
        except (EOFError, OSError):
            reason = "crashed"
            message = (
                "ended its reader: it is damaged, or needs more memory than a reader has "
                "(--memory-limit)"
            )
        self.stop()
        return _failed(file, reason, message)

    def start(self) -> None:
        # a fork would copy locks of pyarrow's threads
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self._folder, self._options), daemon=True
        )
        self._process.start()
        theirs.close()
        self._answer()  # the time limit of a file begins when the process is ready

    def _answer(self) -> Any:
        answer = self._connection.recv()
        if isinstance(answer, InputError):
            raise answer
        return answer

    def stop(self) -> None:
        process = self._process
        self._process = None
        if process is not None:
            with suppress(ProcessLookupError):  # its group may not exist yet
                os.killpg(process.pid or 0, signal.SIGKILL)
            process.kill()
            process.join()


def check_reader(folder: Location, options: DocumentOptions) -> None:
    """Raise InputError if the user's reader cannot be loaded."""
    reader = _Reader(folder, options)
    try:
        reader.start()
    except EOFError as error:
        message = f"--reader {options.reader} ended its process while it was loaded"
        raise InputError(f"{message}; it may need more memory (--memory-limit)") from error
    finally:
        reader.stop()


def read_files(
    files: Iterable[SourceFile], folder: Location, options: DocumentOptions
) -> Generator[Reading, None, None]:
    """Read files in parallel; yield the readings in order. Parts of tables go into `folder`."""
    readers = [_Reader(folder, options) for _ in range(options.workers)]
    idle = deque(readers)

    def read(file: SourceFile) -> Reading:
        reader = idle.pop()
        try:
            return reader.read(file)
        finally:
            idle.append(reader)

    with ThreadPoolExecutor(options.workers) as threads:
        reading: deque[Future[Reading]] = deque()
        try:
            for file in files:
                reading.append(threads.submit(read, file))
                if len(reading) >= _AHEAD * options.workers:
                    yield reading.popleft().result()
            while reading:
                yield reading.popleft().result()
        finally:
            threads.shutdown(wait=False, cancel_futures=True)
            for reader in readers:
                reader.stop()


def _serve(connection: Connection, folder: Location, options: DocumentOptions) -> None:
    # the parent gets it, too, and ends this process
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    resource.setrlimit(
        resource.RLIMIT_AS, (int(options.memory_gib * (1 << 30)), resource.RLIM_INFINITY)
    )
    os.setsid()  # so that programs of a reader end with it
    sys.stdout = sys.stderr
    try:
        if options.reader is not None:
            load_reader(options.reader)
        connection.send(None)
        with suppress(EOFError):
            while True:
                connection.send(_read_file(connection.recv(), folder, options))
    except InputError as error:
        connection.send(error)
