"""Llama 3 in plain PyTorch: config, model, initialisation, text."""

from llama.config import PRESETS, LlamaConfig, RopeScaling
from llama.model import Llama, init_weights

__all__ = ["PRESETS", "Llama", "LlamaConfig", "RopeScaling", "init_weights"]
