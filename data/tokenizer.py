"""Ids to text and back."""

from __future__ import annotations

from collections.abc import Iterable


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


def load_tokenizer(name: str) -> ByteTokenizer:
    """The tokenizer that a token folder names.

    Raises:
        ValueError: if it is not one that this version knows.
    """
    if name != ByteTokenizer.name:
        raise ValueError(f"tokenizer '{name}' is not known; this version has: {ByteTokenizer.name}")
    return ByteTokenizer()
