"""Llama 3 in plain PyTorch: config, model, initialisation, text."""

from llama.config import PRESETS, LlamaConfig, RopeScaling
from llama.hf import Weights, load_hf, load_weights, open_weights, save_hf
from llama.model import Llama, init_weights

__all__ = [
    "PRESETS",
    "Llama",
    "LlamaConfig",
    "RopeScaling",
    "Weights",
    "init_weights",
    "load_hf",
    "load_weights",
    "open_weights",
    "save_hf",
]
