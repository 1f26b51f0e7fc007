"""Text to a token folder: the same bytes whatever the number of processes, complete under its name or absent."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import socket
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from data.read import BadInputError, Part, Piece, count_lines, parts_of_documents, pieces
from data.tokenizer import ByteTokenizer, Tokenizer, digest
from data.tokens import DTYPES, FORMAT, VERSION

HELD_OUT = 0.02  # share of documents kept for validation
SHARD_TOKENS = 2**28  # tokens of one file: 1 GiB in uint32
# Folders of the standard library that are not part of it everywhere, or hold no library code.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


@dataclass
class Encoded:
    """The ids of a part, ready to be written: what a worker gives back."""

    ids: dict[str, bytes] = field(default_factory=lambda: {"train": b"", "validation": b""})
    documents: dict[str, int] = field(default_factory=lambda: {"train": 0, "validation": 0})
    text_bytes: dict[str, int] = field(default_factory=lambda: {"train": 0, "validation": 0})
    last: int = 0  # ids of the last document that ended here in `train`, those of earlier parts left out
    bad: list[tuple[int, str]] = field(default_factory=list)  # line within the part, reason
    lines: int = 0  # of the part, so that the next part of the same file counts on


class Encoder:
    """Parts to ids. One a process; it is all that a worker is given."""

    def __init__(self, tokenizer: Tokenizer, text_field: str = "text", held_out: float = HELD_OUT) -> None:
        self.tokenizer = tokenizer
        self.text_field = text_field
        self.held_out = held_out
        self.dtype = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"

    def __call__(self, part: Part) -> Encoded:
        encoded, parts = Encoded(), {"train": [], "validation": []}
        for piece in pieces(part, self.text_field):
            if isinstance(piece, BadInputError):
                encoded.bad.append((piece.line, piece.reason))
                continue
            split = self.split_of(piece)
            ids = np.array(self._ids(piece), DTYPES[self.dtype]).tobytes()
            parts[split].append(ids)
            encoded.documents[split] += piece.begins
            encoded.text_bytes[split] += len(piece.text.encode("utf-8", "surrogatepass"))
            if split == "train":
                encoded.last = len(ids) // DTYPES[self.dtype].itemsize
        encoded.ids = {split: b"".join(held) for split, held in parts.items()}
        encoded.lines = count_lines(part)
        return encoded

    def split_of(self, piece: Piece) -> str:
        """Whether a document is held out: its digest decides, so the order of the documents does not matter."""
        draw = int.from_bytes(hashlib.sha256(piece.key).digest()[:8], "little")
        return "validation" if draw < self.held_out * 2**64 else "train"

    def _ids(self, piece: Piece) -> list[int]:
        ids = self.tokenizer.encode(piece.text)
        if piece.begins and self.tokenizer.begin_id is not None:
            ids.insert(0, self.tokenizer.begin_id)
        if piece.ends and self.tokenizer.end_id is not None:
            ids.append(self.tokenizer.end_id)
        return ids


class ShardWriter:
    """The files of one split: cut after `SHARD_TOKENS` ids, hashed as they are written."""

    def __init__(self, folder: Path, split: str, dtype: str) -> None:
        self.folder, self.split, self.width = folder, split, DTYPES[dtype].itemsize
        self.shards: list[dict[str, Any]] = []
        self.documents = self.text_bytes = 0
        self._file = None

    @property
    def tokens(self) -> int:
        return sum(shard["tokens"] for shard in self.shards)

    def write(self, ids: bytes) -> None:
        view = memoryview(ids)
        while view:
            if self._file is None or self.shards[-1]["tokens"] == SHARD_TOKENS:
                self.close()
                name = f"{self.split}-{len(self.shards):05d}.bin"
                self.shards.append({"file": name, "tokens": 0, "sha256": hashlib.sha256()})
                self._file = (self.folder / name).open("wb")
            shard = self.shards[-1]
            now = view[: (SHARD_TOKENS - shard["tokens"]) * self.width]
            self._file.write(now)
            shard["sha256"].update(now)
            shard["tokens"] += len(now) // self.width
            view = view[len(now) :]

    def close(self) -> None:
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None

    def take_back(self, tokens: int) -> bytes:
        """The last `tokens` ids, all of them in the last file, which is cut short; the writer is closed before."""
        shard = self.shards[-1]
        path = self.folder / shard["file"]
        with path.open("r+b") as file:
            file.seek(-tokens * self.width, os.SEEK_END)
            border = file.tell()
            ids = file.read()
            file.truncate(border)
            os.fsync(file.fileno())
        shard["tokens"] -= tokens
        shard["sha256"] = hashlib.sha256()
        with path.open("rb") as file:
            while block := file.read(2**22):
                shard["sha256"].update(block)
        return ids

    def describe(self) -> dict[str, Any]:
        shards = [{**shard, "sha256": shard["sha256"].hexdigest()} for shard in self.shards]
        return {"documents": self.documents, "text_bytes": self.text_bytes, "shards": shards}


def prepare_parts(
    parts: Iterable[Part],
    out: str | Path,
    encoder: Encoder,
    workers: int = 1,
    described: dict[str, Any] | None = None,
    skip_bad: bool = False,
    progress: Callable[[int], object] = lambda size: None,
) -> dict[str, Any]:
    """Tokenize parts of text into a token folder: complete under its name, or absent.

    Each document becomes its begin id, its ids, its end id (where the tokenizer has them).

    Args:
        workers: processes; the folder's bytes do not depend on it. 1: this process alone.
        described: what else index.json says.
        skip_bad: leave out what is no text, instead of ending at it.
        progress: told the bytes of input that are done.

    Returns:
        index.json's content; ``bad`` beside it lists what was left out.

    Raises:
        ValueError: there is no text, too little to hold some out, or something that is no text.
        FileExistsError: the folder exists.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists")
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    work = out.parent / f".{out.name}.{socket.gethostname()}-{os.getpid()}.partial"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    try:
        writers = {split: ShardWriter(work, split, encoder.dtype) for split in ("train", "validation")}
        bad: list[str] = []
        lines: dict[str, int] = {}
        last = 0
        for part, encoded in _encode(parts, encoder, workers):
            for line, reason in encoded.bad:
                bad.append(f"{part.name}, line {lines.get(part.name, 0) + line}: {reason}")
                if not skip_bad:
                    raise ValueError(f"{bad[0]} (--on_bad skip leaves such things out)")
            lines[part.name] = lines.get(part.name, 0) + encoded.lines
            last = encoded.last or last
            for split, writer in writers.items():
                writer.write(encoded.ids[split])
                writer.documents += encoded.documents[split]
                writer.text_bytes += encoded.text_bytes[split]
            progress(part.size)
        for writer in writers.values():
            writer.close()
        if not writers["validation"].tokens:
            _hold_out_the_end(writers["train"], writers["validation"], encoder, last)
        tokenizer = encoder.tokenizer
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": encoder.dtype,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.name,
            "begin_id": tokenizer.begin_id,
            "end_id": tokenizer.end_id,
            "splits": {split: writer.describe() for split, writer in writers.items()},
            **(described or {}),
        }
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.save(work)
            index["tokenizer_sha256"] = digest(tokenizer)
        (work / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        for path in (*work.iterdir(), work):
            sync(path)
        work.rename(out)
        sync(out.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return {**index, "bad": bad}


def prepare_documents(documents: Iterable[str], out: str | Path, tokenizer: Tokenizer) -> Path:
    """Tokenize texts in memory into a token folder, in this process; see ``prepare_parts``."""
    prepare_parts(parts_of_documents("the documents given", documents), out, Encoder(tokenizer))
    return Path(out)


def _encode(parts: Iterable[Part], encoder: Encoder, workers: int) -> Iterator[tuple[Part, Encoded]]:
    """Each part and its ids, in order; with several workers no more than a few parts are in memory."""
    if workers == 1:
        for part in parts:
            yield part, encoder(part)
        return
    # Forked workers share the tokenizer that is loaded already; elsewhere forking is not safe, and they load it anew.
    context = get_context("fork" if sys.platform == "linux" else "spawn")
    waiting: deque[tuple[Part, Future]] = deque()
    with ProcessPoolExecutor(workers, context, _start_worker, (encoder,)) as pool:
        try:
            for part in parts:
                waiting.append((part, pool.submit(_work, part)))
                if len(waiting) > 2 * workers:
                    done, future = waiting.popleft()
                    yield done, future.result()
            while waiting:
                done, future = waiting.popleft()
                yield done, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


_encoder: Encoder  # of this worker process


def _start_worker(encoder: Encoder) -> None:
    global _encoder
    _encoder = encoder


def _work(part: Part) -> Encoded:
    return _encoder(part)


def _hold_out_the_end(train: ShardWriter, validation: ShardWriter, encoder: Encoder, last: int) -> None:
    """Hold something out where no document was: the last one, or of a single one its last part.

    Raises:
        ValueError: there is too little text.
    """
    if encoder.held_out == 0 or not train.tokens:
        what = "no text was found" if not train.tokens else "--validation 0 holds nothing out"
        raise ValueError(f"{what}; a run needs text to train on and text to validate on")
    whole = train.documents > 1 and last <= train.shards[-1]["tokens"]
    count = last if whole else max(1, int(train.tokens * encoder.held_out))
    count = min(count, train.shards[-1]["tokens"] - (len(train.shards) == 1))
    if count < 1:
        raise ValueError(f"{train.tokens} tokens are too few to hold some out for validation")
    ids = train.take_back(count)
    validation.write(ids)
    validation.close()
    text = encoder.tokenizer.decode(np.frombuffer(ids, DTYPES[encoder.dtype]).tolist())
    validation.text_bytes = len(text.encode())
    validation.documents = 1
    train.text_bytes = max(1, train.text_bytes - validation.text_bytes)
    train.documents -= whole


def _sweep(out: Path) -> None:
    """Remove what killed attempts at the same folder on this machine left behind."""
    prefix = f".{out.name}.{socket.gethostname()}-"
    for path in out.parent.glob(f"{prefix}*.partial"):
        pid = path.name[len(prefix) : -len(".partial")]
        if pid.isdigit() and not _alive(int(pid)):
            shutil.rmtree(path, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def standard_library_documents() -> Iterator[str]:
    """The Python standard library's own source files on this machine, without its tests, one document a file."""
    root = Path(sysconfig.get_paths()["stdlib"])
    for path in sorted(root.rglob("*.py")):
        if _NOT_LIBRARY.isdisjoint(path.relative_to(root).parts[:-1]):
            try:
                text = path.read_text("utf-8")
            except (UnicodeDecodeError, OSError):
                continue  # a few files of the library are in other encodings on purpose
            if text:
                yield text


def default_folder() -> Path:
    """Where the default text of this Python version lives: a cache folder, made by ``prepare_default``."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "fabric-llama" / f"python-{platform.python_version()}-bytes"


def prepare_default() -> Path:
    """Tokenize the standard library to bytes, once for this Python version, and return the folder."""
    folder = default_folder()
    if not (folder / "index.json").is_file():
        try:
            prepare_documents(standard_library_documents(), folder, ByteTokenizer())
        except OSError:  # another process of the same kind was faster
            if not (folder / "index.json").is_file():
                raise
    return folder
