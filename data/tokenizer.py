"""Ids to text and back: bytes, a Hugging Face tokenizer.json, or Llama 3's tokenizer.model.

All three have the same face: ``name``, ``vocab_size`` (every id is below it), ``begin_id`` and ``end_id`` (None where
the tokenizer has none), ``encode`` (never a special id: text that spells one is text; a tokenizer.json's added tokens
that are not marked special are words like others), ``decode``, ``save``.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import json
import re
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path

JSON, MODEL = "tokenizer.json", "tokenizer.model"
_BESIDE = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja")

# Llama 3's split into words and its 256 special tokens in order of their ids, as in Llama 3.1 and later (in Llama 3
# some of them were still reserved). Source: Meta's llama-models, tokenizer.py, and the published tokenizer.json.
LLAMA3_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
LLAMA3_SPECIAL = [
    "<|begin_of_text|>", "<|end_of_text|>", "<|reserved_special_token_0|>", "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>", "<|reserved_special_token_2|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", *(f"<|reserved_special_token_{i}|>" for i in range(3, 248)),
]  # fmt: skip


class ByteTokenizer:
    """UTF-8 bytes as ids 0 to 255, and two special ids: 256 begins a document, 257 ends it."""

    name = "bytes"
    begin_id = 256
    end_id = 257
    vocab_size = 258

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids: text can never spell one."""
        return list(text.encode("utf-8", "surrogatepass"))

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special and unknown ids are left out, broken UTF-8 becomes U+FFFD."""
        return bytes(i for i in ids if i < 256).decode("utf-8", "replace")

    def save(self, folder: Path) -> None:
        """Write the same tokenizer as a tokenizer.json, which other tools read."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

        # ByteLevel stands each byte for a printable character: printable ones for themselves, the others counted up
        # from 256 (GPT-2's table).
        printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
        others = [byte for byte in range(256) if byte not in printable]
        vocabulary = {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
        tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.decoder = decoders.ByteLevel()
        begin, end = "<|begin_of_text|>", "<|end_of_text|>"
        tokenizer.add_special_tokens([AddedToken(begin, special=True), AddedToken(end, special=True)])
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{begin} $A", special_tokens=[(begin, self.begin_id)]
        )
        tokenizer.save(str(folder / JSON))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end}
        (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")


class JsonTokenizer:
    """A Hugging Face tokenizer.json, and what the files beside it say of its special tokens.

    Raises:
        ValueError: the file is damaged.
    """

    name = JSON

    def __init__(self, path: str | Path) -> None:
        from tokenizers import Tokenizer

        self.path = Path(path)
        try:
            self._tokenizer = Tokenizer.from_file(str(self.path))
        except Exception as error:  # the library raises nothing more exact
            raise ValueError(f"{self.path} is not a tokenizer.json: {error}") from None
        self._tokenizer.encode_special_tokens = True  # special tokens spelled in a text are text
        self._tokenizer.no_truncation()  # both are settings for batches, which some published files carry
        self._tokenizer.no_padding()
        vocabulary = self._tokenizer.get_vocab(with_added_tokens=True)
        if not vocabulary:
            raise ValueError(f"{self.path} has an empty vocabulary")
        self.vocab_size: int = max(vocabulary.values()) + 1
        put = self._tokenizer.encode("", add_special_tokens=True).ids  # by the file's own template
        self.begin_id: int | None = put[0] if put else None
        self.end_id = self._end_id()

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids."""
        return self._tokenizer.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids are left out."""
        return self._tokenizer.decode([i for i in ids if i < self.vocab_size], skip_special_tokens=True)

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's files."""
        shutil.copyfile(self.path, folder / JSON)
        for name in _BESIDE:
            if (self.path.parent / name).is_file():
                shutil.copyfile(self.path.parent / name, folder / name)

    def _end_id(self) -> int | None:
        """The end token: what the files beside say, or else the first usual name that there is."""
        for name in ("tokenizer_config.json", "special_tokens_map.json"):
            beside = self.path.parent / name
            if not beside.is_file():
                continue
            try:
                token = json.loads(beside.read_text(encoding="utf-8")).get("eos_token")
                token = token["content"] if isinstance(token, dict) else token
                if token is not None:
                    return self._tokenizer.token_to_id(token)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, AttributeError, KeyError, TypeError) as e:
                raise ValueError(f"{beside} cannot be understood: {type(e).__name__} {e}") from None
        found = (self._tokenizer.token_to_id(token) for token in ("<|end_of_text|>", "</s>", "<|endoftext|>"))
        return next((i for i in found if i is not None), None)


class TiktokenTokenizer:
    """Llama 3's tokenizer.model: lines of base64 bytes and rank, with Llama 3's pattern and 256 special tokens.

    Raises:
        ValueError: the file is of another kind, such as Llama 2's SentencePiece model.
    """

    name = MODEL

    def __init__(self, path: str | Path) -> None:
        import tiktoken

        self.path = Path(path)
        try:
            # tiktoken's own loader keeps copies by path, and would miss that a file has changed
            lines = (line.split() for line in self.path.read_bytes().splitlines() if line)
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            if not ranks or sorted(ranks.values()) != list(range(len(ranks))):
                raise ValueError("its ranks are not 0, 1, 2, ...")
            if not all(bytes([byte]) in ranks for byte in range(256)):
                raise ValueError("it lacks some of the 256 single bytes")
        except (binascii.Error, ValueError) as error:
            raise ValueError(
                f"{self.path} is not a tiktoken file as Llama 3's ({error}); of a SentencePiece model, such as "
                "Llama 2's, use the tokenizer.json"
            ) from None
        special = {token: len(ranks) + i for i, token in enumerate(LLAMA3_SPECIAL)}
        self._tokenizer = tiktoken.Encoding(
            self.path.name, pat_str=LLAMA3_PATTERN, mergeable_ranks=ranks, special_tokens=special
        )
        self._first_special = len(ranks)
        self.vocab_size = len(ranks) + len(special)
        self.begin_id = special["<|begin_of_text|>"]
        self.end_id = special["<|end_of_text|>"]

    def encode(self, text: str) -> list[int]:
        """Ids of a text, without special ids."""
        return [i for part in _parts(text) for i in self._tokenizer.encode_ordinary(part)]

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids; special ids are left out, broken UTF-8 becomes U+FFFD."""
        return self._tokenizer.decode([i for i in ids if i < self._first_special])

    def save(self, folder: Path) -> None:
        """Copy the tokenizer's file."""
        shutil.copyfile(self.path, folder / MODEL)


_LONGEST_RUN, _LONGEST_PART = 25_000, 400_000  # characters; Meta's tokenizer.py


def _parts(text: str) -> Iterator[str]:
    """Cut a text as Meta's tokenizer does before tiktoken sees it, which fails on very long runs: every 400,000
    characters, and every 25,000 within a run that is all white space or all not."""
    for start in range(0, len(text), _LONGEST_PART):
        part = text[start : start + _LONGEST_PART]
        cut = 0
        for low, high in _long_runs(part):
            for border in range(low + _LONGEST_RUN, high, _LONGEST_RUN):
                yield part[cut:border]
                cut = border
        yield part[cut:]


def _long_runs(text: str) -> Iterator[tuple[int, int]]:
    """Where a run of white space, or of none, is longer than `_LONGEST_RUN`: one that is covers a multiple of it."""
    position = 0
    while position < len(text):
        space = text[position].isspace()
        found = (_NO_SPACE if space else _SPACE).search(text, position)
        high = found.start() if found else len(text)
        low = position
        while low and position - low <= _LONGEST_RUN and text[low - 1].isspace() == space:
            low -= 1
        if high - low > _LONGEST_RUN:
            yield low, high
            position = high
        else:
            position += _LONGEST_RUN


_SPACE, _NO_SPACE = re.compile(r"\s"), re.compile(r"\S")


Tokenizer = ByteTokenizer | JsonTokenizer | TiktokenTokenizer


def load_tokenizer(source: str | Path) -> Tokenizer:
    """The tokenizer that is `bytes`, a tokenizer.json, a tokenizer.model, or in a folder that holds one of the two.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is damaged, or of no kind that is known.
    """
    if str(source) == ByteTokenizer.name:
        return ByteTokenizer()
    path = Path(source)
    if path.is_dir():
        found = [path / name for name in (JSON, MODEL) if (path / name).is_file()]
        if not found:
            raise FileNotFoundError(f"{path} holds no tokenizer: neither {JSON} nor {MODEL}")
        path = found[0]
    if not path.is_file():
        raise FileNotFoundError(f"there is no tokenizer {path}; a tokenizer is `bytes`, a {JSON} or a {MODEL}")
    return JsonTokenizer(path) if path.suffix == ".json" else TiktokenTokenizer(path)


def digest(tokenizer: Tokenizer) -> str | None:
    """sha256 of the tokenizer's file; None for bytes, which have none."""
    return None if isinstance(tokenizer, ByteTokenizer) else hashlib.sha256(tokenizer.path.read_bytes()).hexdigest()
