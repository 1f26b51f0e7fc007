"""Text as tokens, and the order in which they are trained on. This package knows no model."""

from data.order import Era, Mixture, RankBatches, Shuffled, window_of
from data.prepare import default_folder, prepare_default, prepare_documents
from data.tokenizer import ByteTokenizer, JsonTokenizer, TiktokenTokenizer, Tokenizer, digest, load_tokenizer
from data.tokens import IGNORED, HeldOut, RandomTokens, TokenDataset, adopt, fingerprint, read_index

__all__ = [
    "IGNORED",
    "ByteTokenizer",
    "Era",
    "HeldOut",
    "JsonTokenizer",
    "Mixture",
    "RandomTokens",
    "RankBatches",
    "Shuffled",
    "TiktokenTokenizer",
    "TokenDataset",
    "Tokenizer",
    "adopt",
    "default_folder",
    "digest",
    "fingerprint",
    "load_tokenizer",
    "prepare_default",
    "prepare_documents",
    "read_index",
    "window_of",
]
