"""A token folder: ids as fixed-width little-endian integers in memory-mapped files, described by an index.json.

index.json            format, version, dtype, vocab_size, tokenizer (`bytes` or the name of its file, and the file's
                      sha256), special ids, and for each split its shards (file, tokens, sha256), documents and bytes
                      of text
tokenizer.json        or tokenizer.model, where the tokenizer has a file
train-00000.bin ...   the ids of one split, one document after the other, each between its two special ids
validation-00000.bin  held-out documents
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import os
import shutil
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.tokenizer import JSON, MODEL, ByteTokenizer, Tokenizer, digest, load_tokenizer

if TYPE_CHECKING:  # its import takes seconds, which tokenizing text need not wait for
    from torch import Tensor

IGNORED = -100  # a label that is not trained on, PyTorch's own default
FORMAT = "fabric-llama tokens"
VERSION = 1
DTYPES = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
_HASH_UP_TO = 256 * 2**20  # bytes of shards whose checksums are compared at every start


class TokenDataset:
    """Windows of a split: item i is (inputs, labels), each (S,) int64, labels the inputs moved on by one token.

    N tokens hold floor((N - 1) / S) windows of length S; windows do not overlap, apart from the last label of one being
    the first input of the next.

    Args:
        folder: made by ``data.prepare_documents``.
        sequence_length: S, in tokens.
        split: "train" or "validation".

    Raises:
        FileNotFoundError: the folder or a shard is missing.
        ValueError: the folder is not a token folder, is damaged, of a later version, or shorter than one window.
    """

    def __init__(self, folder: str | Path, sequence_length: int, split: str = "train") -> None:
        self.folder = Path(folder)
        self.sequence_length = sequence_length
        self.split = split
        self.index = read_index(self.folder)
        described = self.index["splits"][split]
        self.text_bytes: int | None = described["text_bytes"]  # None where ids were adopted without their tokenizer
        self._shards = [self.folder / shard["file"] for shard in described["shards"]]
        self._starts = [0]  # position of each shard's first token, and the end
        for shard in described["shards"]:
            self._starts.append(self._starts[-1] + shard["tokens"])
        if len(self) < 1:
            raise ValueError(
                f"{self.folder} holds {self.tokens:,} tokens in split '{split}', too few for one sequence of "
                f"{sequence_length} and its next token; use a shorter --data.sequence_length or more text"
            )

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The tokenizer that made the ids, loaded at each call; None where ids were adopted without it."""
        name = self.index["tokenizer"]
        if name is None:
            return None
        return ByteTokenizer() if name == ByteTokenizer.name else load_tokenizer(self.folder / name)

    @property
    def tokens(self) -> int:
        """Tokens of the split."""
        return self._starts[-1]

    def __len__(self) -> int:
        return max(0, self.tokens - 1) // self.sequence_length

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        if not 0 <= window < len(self):
            raise IndexError(f"window {window} of {len(self)}")
        start = window * self.sequence_length
        import torch

        tokens = torch.from_numpy(self.read(start, start + self.sequence_length + 1).astype(np.int64))
        highest = int(tokens.max())
        if highest >= self.index["vocab_size"]:
            position = start + int((tokens >= self.index["vocab_size"]).int().argmax())
            highest = int(tokens[position - start])
            shard = bisect.bisect_right(self._starts, position) - 1
            raise ValueError(
                f"{self._shards[shard]}: token {position - self._starts[shard]:,} (token {position:,} of split "
                f"'{self.split}') is {highest}, outside the vocabulary of {self.index['vocab_size']}; the folder is "
                f"damaged or its dtype is not {self.index['dtype']}"
            )
        return tokens[:-1], tokens[1:]

    def read(self, start: int, stop: int) -> np.ndarray:
        """The ids at positions start to stop - 1 of the split."""
        parts = []
        while start < stop:
            shard = bisect.bisect_right(self._starts, start) - 1
            offset = start - self._starts[shard]
            parts.append(_mapped(self._shards[shard], self.index["dtype"])[offset : offset + stop - start])
            start += len(parts[-1])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def documents(self, count: int) -> Iterator[list[int]]:
        """The ids of the first documents, with their special ids; at most a million ids of each."""
        end, begin = self.index["end_id"], self.index["begin_id"]
        start = 0
        for _ in range(min(count, self.index["splits"][self.split]["documents"])):
            ids = self.read(start, min(start + 10**6, self.tokens))
            borders = np.flatnonzero(ids == end) + 1 if end is not None else np.flatnonzero(ids[1:] == begin) + 1
            stop = int(borders[0]) if len(borders) else len(ids)
            if stop == 0:
                return
            yield ids[:stop].tolist()
            start += stop


@lru_cache(maxsize=64)
def _mapped(path: Path, dtype: str) -> np.memmap:
    """A shard in memory-mapped form; few at a time, since each holds a file open and there may be thousands."""
    return np.memmap(path, DTYPES[dtype], "r")


class HeldOut:
    """The held-out windows of several sources, one source after the other: item i is (inputs, labels)."""

    def __init__(self, datasets: Sequence[TokenDataset]) -> None:
        self.datasets = list(datasets)
        self._ends = list(itertools.accumulate(len(dataset) for dataset in self.datasets))

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        source = bisect.bisect_right(self._ends, window)
        return self.datasets[source][window - (self._ends[source - 1] if source else 0)]

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The one tokenizer of all sources."""
        return self.datasets[0].tokenizer

    @property
    def bytes_per_token(self) -> float | None:
        """Bytes of text behind a token, on average; None where a source does not know."""
        sizes = [dataset.text_bytes for dataset in self.datasets]
        return None if None in sizes else sum(sizes) / sum(dataset.tokens for dataset in self.datasets)


class RandomTokens:
    """Seeded random tokens, as in Lightning's tensor-parallel example: item i is a pure function of (seed, i)."""

    def __init__(self, vocab_size: int, sequence_length: int, seed: int, windows: int = 2**40) -> None:
        self.vocab_size = vocab_size
        self.sequence_length = sequence_length
        self.seed = seed
        self.windows = windows

    def __len__(self) -> int:
        return self.windows

    def __getitem__(self, window: int) -> tuple[Tensor, Tensor]:
        import torch

        generator = np.random.Generator(np.random.Philox(key=[self.seed, window]))
        tokens = torch.from_numpy(generator.integers(0, self.vocab_size, self.sequence_length + 1, dtype=np.int64))
        return tokens[:-1], tokens[1:]


def read_index(folder: Path, compare_all: bool = False) -> dict:
    """The folder's index, its shards' sizes compared with it, and their checksums too where that takes no time.

    Args:
        compare_all: compare the checksums of a large folder too, which reads all of it.

    Raises:
        FileNotFoundError, ValueError: as ``TokenDataset``.
    """
    path = folder / "index.json"
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no token folder at {folder}")
    if not path.is_file():
        raise FileNotFoundError(f"{folder} is not a complete token folder: it holds no index.json")
    try:
        index = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as e:
        raise ValueError(f"{path} is damaged: {e}") from None
    if not isinstance(index, dict) or index.get("format") != FORMAT:
        raise ValueError(f"{path} is not the index of a token folder: its format is not '{FORMAT}'")
    if index.get("version") != VERSION:
        raise ValueError(f"{path} is of version {index.get('version')}; this program reads version {VERSION}")
    try:
        shards = [shard for split in index["splits"].values() for shard in split["shards"]]
        width = DTYPES[index["dtype"]].itemsize
        total = width * sum(shard["tokens"] for shard in shards)
        for shard in shards:
            if Path(shard["file"]).name != shard["file"]:
                raise ValueError(f"{path} names {shard['file']}, which is not a file of the folder itself")
            _check_shard(
                folder / shard["file"], shard["tokens"] * width, shard["sha256"], compare_all or total <= _HASH_UP_TO
            )
        splits = [index["splits"][name] for name in ("train", "validation")]
        sizes = [split["text_bytes"] for split in splits]  # None where adopted ids came without their tokenizer
        if index["vocab_size"] < 1 or not all(split["shards"] for split in splits) or 0 in sizes:
            raise ValueError(f"{path} is damaged: its vocabulary or one of its splits is empty")
        name = index["tokenizer"]
        if name not in (ByteTokenizer.name, JSON, MODEL, None):
            known = ", ".join((ByteTokenizer.name, JSON, MODEL))
            raise ValueError(f"{path}: tokenizer '{name}' is not known; there are: {known}")
        if name in (JSON, MODEL):
            _check_hash(folder / name, index["tokenizer_sha256"])
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{path} is damaged: {type(e).__name__} {e}") from None
    return index


def _check_shard(path: Path, size: int, sha256: str, compare_hash: bool) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; index.json names it")
    if path.stat().st_size != size:
        raise ValueError(f"{path} is damaged: it has {path.stat().st_size:,} bytes, index.json says {size:,}")
    if compare_hash:
        _check_hash(path, sha256)


def _check_hash(path: Path, sha256: str) -> None:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing; index.json names it")
    digest_of = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**22):
            digest_of.update(block)
    found = digest_of.hexdigest()
    if found != sha256:
        raise ValueError(f"{path} is damaged: its sha256 is {found[:12]}..., index.json says {sha256[:12]}...")


def fingerprint(index: dict) -> str:
    """What the tokens are, as 16 hex digits: a digest of every shard's checksum, the tokenizer and the dtype."""
    described = {
        "dtype": index["dtype"],
        "tokenizer": index["tokenizer"],
        **({"tokenizer_sha256": index["tokenizer_sha256"]} if "tokenizer_sha256" in index else {}),
        "shards": {name: [s["sha256"] for s in split["shards"]] for name, split in index["splits"].items()},
    }
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:16]


def adopt(
    files: Mapping[str, Sequence[Path]],
    out: str | Path,
    dtype: str,
    vocab_size: int,
    tokenizer: Tokenizer | None = None,
    begin_id: int | None = None,
    end_id: int | None = None,
) -> dict:
    """Make a token folder of files that hold nothing but ids, little-endian, as nanoGPT's scripts write them.

    The files are linked where they are on the same disk, else copied; every id is compared with the vocabulary.

    Args:
        files: of the splits "train" and "validation".
        dtype: "uint16" or "uint32".
        tokenizer: that made them; without one there are no text samples and no bits a byte.

    Returns:
        index.json's content.

    Raises:
        FileNotFoundError, FileExistsError: a file is missing; the folder exists.
        ValueError: a file is empty, of another width, or holds an id outside the vocabulary.
    """
    out = Path(out)
    if out.exists():
        raise FileExistsError(f"{out} exists; choose another folder")
    if tokenizer is not None and tokenizer.vocab_size > vocab_size:
        raise ValueError(f"the tokenizer has {tokenizer.vocab_size:,} ids, more than --vocab_size {vocab_size:,}")
    begin_id = tokenizer.begin_id if begin_id is None and tokenizer else begin_id
    end_id = tokenizer.end_id if end_id is None and tokenizer else end_id
    splits = {
        split: _adopted(split, paths, dtype, vocab_size, tokenizer, end_id if begin_id is None else begin_id)
        for split, paths in files.items()
    }
    index = {
        "format": FORMAT,
        "version": VERSION,
        "dtype": dtype,
        "vocab_size": vocab_size,
        "tokenizer": tokenizer.name if tokenizer else None,
        "begin_id": begin_id,
        "end_id": end_id,
        "splits": splits,
    }
    work = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.partial"
    work.mkdir(parents=True)
    try:
        for split, paths in files.items():
            for shard, path in zip(splits[split]["shards"], paths, strict=True):
                try:
                    os.link(path, work / shard["file"])
                except OSError:
                    shutil.copyfile(path, work / shard["file"])
        if tokenizer is not None and tokenizer.name != ByteTokenizer.name:
            tokenizer.save(work)
            index["tokenizer_sha256"] = digest(tokenizer)
        (work / "index.json").write_text(json.dumps(index, indent=1) + "\n")
        work.rename(out)
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return index


def _adopted(
    split: str, paths: Sequence[Path], dtype: str, vocab_size: int, tokenizer: Tokenizer | None, border: int | None
) -> dict:
    """index.json's description of a split of adopted files, after every id was looked at."""
    width = DTYPES[dtype].itemsize
    shards, documents, text_bytes = [], 0, 0
    for number, path in enumerate(paths):
        if not path.is_file():
            raise FileNotFoundError(f"there is no file {path}")
        size = path.stat().st_size
        if size == 0 or size % width:
            raise ValueError(f"{path} has {size:,} bytes, which is no whole number of ids of {width} bytes ({dtype})")
        ids, sha256 = np.memmap(path, DTYPES[dtype], "r"), hashlib.sha256()
        for start in range(0, len(ids), 2**22):
            part = ids[start : start + 2**22]
            if int(part.max()) >= vocab_size:
                position = start + int((part >= vocab_size).argmax())
                raise ValueError(
                    f"{path}: token {position:,} is {int(ids[position])}, outside the vocabulary of {vocab_size:,}; "
                    "the width or the vocabulary is another"
                )
            documents += int((part == border).sum()) if border is not None else 0
            if tokenizer is not None:
                text_bytes += len(tokenizer.decode(part.tolist()).encode())
            sha256.update(part.tobytes())
        shards.append({"file": f"{split}-{number:05d}.bin", "tokens": len(ids), "sha256": sha256.hexdigest()})
    return {"documents": max(1, documents), "text_bytes": text_bytes or None, "shards": shards}
