"""Text as tokens, and the order in which they are trained on. This package knows no model."""

from data.order import RankBatches, Shuffled, window_of
from data.prepare import default_folder, prepare_default, prepare_documents
from data.tokenizer import ByteTokenizer, load_tokenizer
from data.tokens import IGNORED, RandomTokens, TokenDataset, fingerprint, read_index

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "RandomTokens",
    "RankBatches",
    "Shuffled",
    "TokenDataset",
    "default_folder",
    "fingerprint",
    "load_tokenizer",
    "prepare_default",
    "prepare_documents",
    "read_index",
    "window_of",
]
