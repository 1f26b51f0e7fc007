"""Where text comes from: files, folders, compressed lines, Parquet, standard input, data sets; cut into parts.

A part is what one worker process reads and tokenizes: some megabytes, whatever the size of the files. Parts follow from
the input alone, so the tokens do not depend on how many workers share them.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

PART_BYTES = 8 * 2**20  # of text in one part, about
_KEY_BYTES = 2**16  # of a text longer than a part, what decides whether it is held out

LINES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".ndjson", ".ndjson.gz", ".ndjson.zst")
TEXT = (
    ".txt", ".md", ".rst", ".tex", ".org", ".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".rs", ".go",
    ".java", ".kt", ".scala", ".js", ".mjs", ".ts", ".jsx", ".tsx", ".rb", ".php", ".sh", ".sql", ".html", ".css",
    ".yaml", ".yml", ".toml", ".r", ".jl", ".swift", ".lua", ".pl", ".hs", ".ml", ".ex", ".erl", ".clj", ".cs",
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """A part of the input.

    ``kind`` says how it is read: `text` is a range of a file that is one document; `lines` the JSON lines that begin
    in a range of a file; `rows` a row group of a Parquet file; `text given` and `lines given` hold their bytes,
    `documents` its texts.
    """

    name: str  # of the file, for messages
    kind: str
    start: int = 0
    stop: int = 0
    begins: bool = True  # of one document: whether this part is its first
    ends: bool = True
    key: bytes = b""  # of a document in several parts: what decides whether it is held out
    given: Any = None
    size: int = 0  # bytes of input that it stands for, for the progress display


@dataclass(frozen=True)
class Piece:
    """A document, or a part of one."""

    text: str
    key: bytes  # decides whether the document is held out
    begins: bool = True
    ends: bool = True


class BadInputError(ValueError):
    """Something that is not text: the message begins with its line, counted from 1 within its part."""

    def __init__(self, line: int, reason: str) -> None:
        super().__init__(f"line {line}: {reason}")
        self.line, self.reason = line, reason


def find_files(sources: Iterable[str]) -> tuple[list[Path], list[Path]]:
    """The files of several sources, folders searched through, in a fixed order; and those of kinds that are not read.

    What is hidden in a folder (its name begins with a dot) is passed over.

    Raises:
        FileNotFoundError: a source does not exist.
    """
    files, others = [], []
    for source in map(Path, sources):
        if source.is_dir():
            for path in sorted(p for p in source.rglob("*") if p.is_file()):
                if any(part.startswith(".") or part == "__pycache__" for part in path.relative_to(source).parts):
                    continue
                known = path.name.lower().endswith((*LINES, *TEXT, ".parquet"))
                (files if known else others).append(path)
        elif source.is_file():
            files.append(source)
        else:
            raise FileNotFoundError(f"there is no file or folder {source}")
    return files, others


def parts_of_file(path: Path, text_field: str) -> Iterator[Part]:
    """The parts of a file; an empty file has none."""
    name, size = path.name.lower(), path.stat().st_size
    if name.endswith((".gz", ".zst")):
        with _open_compressed(path) as (file, position):
            yield from parts_of_lines(str(path), file, position)
    elif name.endswith(LINES):
        for start in range(0, size, PART_BYTES):
            stop = min(start + PART_BYTES, size)
            yield Part(str(path), "lines", start, stop, size=stop - start)
    elif name.endswith(".parquet"):
        yield from _parts_of_parquet(path, text_field)
    elif size:
        yield from _parts_of_text(path, size)


def parts_of_lines(name: str, file: IO[bytes], position=None) -> Iterator[Part]:
    """JSON lines that can be read once only, in the hands of each part."""
    before = 0
    while block := file.read(PART_BYTES):
        block += file.readline()
        now = position() if position else before + len(block)
        yield Part(name, "lines given", given=block, size=now - before)
        before = now


def parts_of_stream(name: str, file: IO[bytes]) -> Iterator[Part]:
    """A text that can be read once only, one document, in the hands of each part."""
    block, first = file.read(PART_BYTES), True
    key = b""
    while block:
        following = file.read(PART_BYTES)
        if following and (cut := _cut(block)):
            block, following = block[:cut], block[cut:] + following
        if first:
            key = block if not following else block[:_KEY_BYTES]
        yield Part(name, "text given", begins=first, ends=not following, key=key, given=block, size=len(block))
        block, first = following, False


def parts_of_documents(name: str, documents: Iterable[str]) -> Iterator[Part]:
    """Texts in memory, some megabytes to a part."""
    held: list[str] = []
    characters = 0
    for text in documents:
        held.append(text)
        characters += len(text)
        if characters >= PART_BYTES:
            yield Part(name, "documents", given=held, size=characters)
            held, characters = [], 0
    if held:
        yield Part(name, "documents", given=held, size=characters)


def pieces(part: Part, text_field: str) -> Iterator[Piece | BadInputError]:
    """The documents in a part, and in their places what is none."""
    if part.kind == "documents":
        for text in part.given:
            yield Piece(text, _bytes(text))
    elif part.kind in ("text", "text given"):
        yield _piece_of_text(part)
    elif part.kind == "rows":
        yield from _documents_of_rows(part, text_field)
    else:
        for number, line in enumerate(_lines(part), 1):
            if line.strip():
                yield _document_of_line(number, line, text_field)


def count_lines(part: Part) -> int:
    """Lines in a part, so that the next part of its file counts on; for parts of texts and data sets 0."""
    if part.kind == "rows":
        return part.stop - part.start
    return sum(1 for _ in _lines(part)) if part.kind in ("lines", "lines given") else 0


def _bytes(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


def _piece_of_text(part: Part) -> Piece | BadInputError:
    content, key = part.given, part.key
    if content is None:
        with open(part.name, "rb") as file:
            if not (part.begins and part.ends):
                key = file.read(_KEY_BYTES)
            file.seek(part.start)
            content = file.read(part.stop - part.start)
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        return BadInputError(content[: error.start].count(b"\n") + 1, f"byte {error.start:,} is not UTF-8")
    return Piece(text, key or content, part.begins, part.ends)


def _lines(part: Part) -> Iterator[bytes]:
    if part.given is not None:
        yield from io.BytesIO(part.given)
        return
    with open(part.name, "rb") as file:
        if part.start:
            file.seek(part.start - 1)
            file.readline()  # the line that began before
        while file.tell() < part.stop and (line := file.readline()):
            yield line


def _document_of_line(number: int, line: bytes, field: str) -> Piece | BadInputError:
    try:
        content = json.loads(line)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return BadInputError(number, f"it is not JSON ({error})")
    except RecursionError:
        return BadInputError(number, "it is nested too deeply")
    if not isinstance(content, dict):
        return BadInputError(number, "it is not a JSON object")
    return _document(number, content.get(field), field, content)


def _document(number: int, text: object, field: str, fields: Iterable[str]) -> Piece | BadInputError:
    if isinstance(text, str):
        return Piece(text, _bytes(text))
    if text is None:
        return BadInputError(
            number, f"it has no field '{field}' (it has {', '.join(sorted(map(str, fields))) or 'none'})"
        )
    return BadInputError(number, f"its field '{field}' is no text but {type(text).__name__}")


def _parts_of_text(path: Path, size: int) -> Iterator[Part]:
    start = 0
    with path.open("rb") as file:
        while start < size:
            stop = size
            if size - start > PART_BYTES:
                file.seek(start)
                stop = start + (_cut(file.read(PART_BYTES)) or PART_BYTES)
            yield Part(str(path), "text", start, stop, start == 0, stop == size, size=stop - start)
            start = stop


def _cut(block: bytes) -> int:
    """Where to cut a text: behind the last line end that ASCII that is no space follows, where every tokenizer that
    splits lines from words splits anyway; else between two characters. 0: nowhere."""
    end = len(block) - 1
    while (end := block.rfind(b"\n", 0, end)) > 0:
        if 0x21 <= block[end + 1] <= 0x7E:
            return end + 1
    cut = len(block)
    while cut > max(0, len(block) - 4) and (block[cut - 1] & 0xC0) == 0x80:
        cut -= 1
    return max(0, cut - 1)


def _parts_of_parquet(path: Path, field: str) -> Iterator[Part]:
    parquet = needed("pyarrow.parquet", "data", "Parquet files")
    try:
        file = parquet.ParquetFile(path)
    except Exception as error:  # pyarrow raises several kinds
        raise ValueError(f"{path} is not a Parquet file: {error}") from None
    names = file.schema_arrow.names
    if field not in names:
        raise ValueError(f"{path} has no column '{field}'; it has {', '.join(names)} (--text_field)")
    row = 0
    for group in range(file.metadata.num_row_groups):
        described = file.metadata.row_group(group)
        yield Part(str(path), "rows", row, row + described.num_rows, given=group, size=described.total_byte_size)
        row += described.num_rows


def _documents_of_rows(part: Part, field: str) -> Iterator[Piece | BadInputError]:
    table = needed("pyarrow.parquet", "data", "Parquet files").ParquetFile(part.name)
    number = 0
    for batch in table.iter_batches(row_groups=[part.given], columns=[field], batch_size=1024):
        for value in batch.column(0).to_pylist():
            number += 1
            yield _document(number, value, field, [field])


@contextmanager
def _open_compressed(path: Path) -> Iterator[tuple[IO[bytes], Any]]:
    """The decompressed content, and how many compressed bytes of it have been read."""
    with path.open("rb") as raw:
        if path.suffix.lower() == ".gz":
            with gzip.open(raw) as file:
                yield io.BufferedReader(file), raw.tell
        else:
            zstandard = needed("zstandard", "data", ".zst files")
            with zstandard.ZstdDecompressor().stream_reader(raw, read_across_frames=True) as file:
                yield io.BufferedReader(file), raw.tell


def documents_of_dataset(name: str, field: str) -> Iterator[str]:
    """The texts of a data set of the library datasets: NAME, or NAME:SPLIT (default: train)."""
    datasets = needed("datasets", "hf", "hf: sources")
    name, _, split = name.partition(":")
    rows = datasets.load_dataset(name, split=split or "train")
    if field not in rows.column_names:
        raise ValueError(f"hf:{name} has no column '{field}'; it has {', '.join(rows.column_names)} (--text_field)")
    for row in rows:
        yield row[field]


def needed(module: str, extra: str, what: str) -> Any:
    """A module of an optional extra.

    Raises:
        ValueError: it is not installed.
    """
    import importlib

    try:
        return importlib.import_module(module)
    except ImportError:
        raise ValueError(
            f"{what} need the package {module.split('.')[0]}: pip install 'fabric-llama[{extra}]'"
        ) from None


def standard_input() -> IO[bytes]:
    return sys.stdin.buffer


def describe_inputs(files: Iterable[Path]) -> str:
    """What files were read, as 16 hex digits: a digest of their names, sizes and times of change."""
    digest = hashlib.sha256()
    for path in files:
        status = path.stat()
        digest.update(f"{path.resolve()} {status.st_size} {status.st_mtime_ns}\n".encode())
    return digest.hexdigest()[:16]
