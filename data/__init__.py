"""Text as tokens, and the order in which they are trained on. This package knows no model."""

from data.order import RankBatches, Shuffled, window_of
from data.prepare import default_folder, prepare_default, prepare_documents
from data.tokenizer import ByteTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer, digest, load_tokenizer
from data.tokens import IGNORED, RandomTokens, TokenDataset, fingerprint, read_index

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "JsonTokenizer",
    "RandomTokens",
    "RankBatches",
    "Shuffled",
    "TiktokenTokenizer",
    "TokenDataset",
    "Tokenizer",
    "default_folder",
    "digest",
    "fingerprint",
    "load_tokenizer",
    "prepare_default",
    "prepare_documents",
    "read_index",
    "window_of",
]
