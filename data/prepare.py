"""Text to a token folder."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import sysconfig
import uuid
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from data.tokenizer import ByteTokenizer, Tokenizer, digest
from data.tokens import DTYPES, FORMAT, VERSION

_HELD_OUT = 0.02  # share of documents kept for validation
# Folders of the standard library that are not part of it everywhere, or hold no library code.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}


def prepare_documents(documents: Iterable[str], out: str | Path, tokenizer: Tokenizer) -> Path:
    """Tokenize documents into a token folder: complete under its name, or absent.

    Each document becomes its begin id, its ids, its end id (where the tokenizer has them). The digest of its text
    decides whether it is held out for validation, so the split does not depend on the order of the documents.

    Returns:
        The folder.

    Raises:
        ValueError: no document was kept for one of the two splits.
    """
    out = Path(out)
    dtype_name = "uint16" if tokenizer.vocab_size <= 2**16 else "uint32"
    work = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir(parents=True)
    try:
        splits = {
            name: {"documents": 0, "text_bytes": 0, "tokens": 0, "sha256": hashlib.sha256()}
            for name in ("train", "validation")
        }
        files = {name: (work / f"{name}-00000.bin").open("wb") for name in splits}
        for text in documents:
            encoded = text.encode("utf-8", "surrogatepass")
            draw = int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little")
            name = "validation" if draw < _HELD_OUT * 2**64 else "train"
            ids = [tokenizer.begin_id, *tokenizer.encode(text), tokenizer.end_id]
            ids = np.array([i for i in ids if i is not None], DTYPES[dtype_name])
            files[name].write(ids.tobytes())
            splits[name]["sha256"].update(ids.tobytes())
            splits[name]["documents"] += 1
            splits[name]["text_bytes"] += len(encoded)
            splits[name]["tokens"] += len(ids)
        for file in files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        empty = [name for name, split in splits.items() if not split["documents"]]
        if empty:
            raise ValueError(f"no document fell into split {' and '.join(empty)}; give more documents")
        index = {
            "format": FORMAT,
            "version": VERSION,
            "dtype": dtype_name,
            "vocab_size": tokenizer.vocab_size,
            "tokenizer": tokenizer.name,
            "begin_id": tokenizer.begin_id,
            "end_id": tokenizer.end_id,
            "splits": {
                name: {
                    "documents": split["documents"],
                    "text_bytes": split["text_bytes"],
                    "shards": [
                        {
                            "file": f"{name}-00000.bin",
                            "tokens": split["tokens"],
                            "sha256": split["sha256"].hexdigest(),
                        }
                    ],
                }
                for name, split in splits.items()
            },
        }
        if not isinstance(tokenizer, ByteTokenizer):
            tokenizer.save(work)
            index["tokenizer_sha256"] = digest(tokenizer)
        (work / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        try:
            work.rename(out)
        except OSError:  # another process of the same kind was faster
            if not (out / "index.json").is_file():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return out


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
        prepare_documents(standard_library_documents(), folder, ByteTokenizer())
    return folder
