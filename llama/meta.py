"""Weights in Meta's own layout: params.json and consolidated.NN.pth, one file or one for each model-parallel rank.

Meta's RoPE turns neighbouring rows (2k, 2k + 1) of each head of wq and wk, ours the rows (k, k + K/2): reading puts
the rows in our order. Source of the layout: Meta's ``llama-models``, ``models/llama3``.
"""

from __future__ import annotations

import json
import pickle
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from llama.config import LlamaConfig, RopeScaling
from llama.hf import Weights, account, equal, parameter_shapes

# Along which axis a matrix is cut over the model-parallel pieces, by the module's last name; norms are in every piece.
# The embedding is cut over the vocabulary in Llama 3 and over the width in Llama 2: its pieces' shapes tell.
_AXES = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0}


@dataclass(frozen=True)
class PiecedTensor:
    """A tensor in one or more memory-mapped pieces; slicing it reads that part alone."""

    pieces: tuple[Tensor, ...]
    axis: int
    rotated: int = 0  # head_dim, where rows are to be put from neighbouring pairs into halves; else 0

    @property
    def shape(self) -> tuple[int, ...]:
        shape = list(self.pieces[0].shape)
        shape[self.axis] = sum(piece.shape[self.axis] for piece in self.pieces)
        return tuple(shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.pieces[0].dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        start, stop, _ = part[0].indices(self.shape[0])
        if not self.rotated or start == stop:
            return self._read(part)
        first = start // self.rotated * self.rotated  # whole heads
        last = -(-stop // self.rotated) * self.rotated
        heads = self._read((slice(first, last), *part[1:]))
        heads = heads.unflatten(0, (-1, self.rotated // 2, 2)).transpose(1, 2).flatten(0, 2)
        return heads[start - first : stop - first]

    def _read(self, part: tuple[slice, ...]) -> Tensor:
        start, stop, _ = part[self.axis].indices(self.shape[self.axis])
        found, offset = [], 0
        for piece in self.pieces:
            size = piece.shape[self.axis]
            low, high = max(start - offset, 0), min(stop - offset, size)
            if low < high or (start == stop and not found):
                inner = list(part)
                inner[self.axis] = slice(low, max(low, high))
                found.append(piece[tuple(inner)])
            offset += size
        return found[0] if len(found) == 1 else torch.cat(found, self.axis)


def open_meta(folder: Path) -> Weights:
    """Open a folder in Meta's layout and account for every tensor; see ``llama.hf.open_weights``."""
    path = folder / "params.json"
    try:
        params = json.loads(path.read_text(encoding="utf-8"))
        scaled = params.get("use_scaled_rope", False)
        if not isinstance(scaled, bool):
            raise ValueError(f"{path}: use_scaled_rope is {scaled!r}, neither true nor false")
        files = sorted(folder.glob("consolidated.[0-9][0-9].pth"))
        if not files:
            raise FileNotFoundError(f"{folder} holds no consolidated.NN.pth")
        numbered = [f"consolidated.{i:02d}.pth" for i in range(len(files))]
        if [file.name for file in files] != numbered:
            lost = sorted(set(numbered) - {file.name for file in files})
            raise FileNotFoundError(f"{folder} holds {len(files)} pieces, but not {', '.join(lost)}")
        pieces = [_open_piece(file) for file in files]
        heads = params["n_heads"]
        head_dim = params["dim"] // heads
        tensors = _join(folder, pieces, params["dim"], head_dim)
        embedding, output = tensors.get("tok_embeddings.weight"), tensors.get("output.weight")
        tied = embedding is not None and (output is None or equal(output, embedding))
        if tied:
            tensors.pop("output.weight", None)
        vocab_size = params.get("vocab_size", -1)
        if vocab_size == -1 and embedding is not None:  # Llama 2 leaves it to the tokenizer
            vocab_size = embedding.shape[0]
        config = LlamaConfig(
            vocab_size=vocab_size,
            dim=params["dim"],
            n_layers=params["n_layers"],
            n_heads=heads,
            n_kv_heads=params.get("n_kv_heads") or heads,
            head_dim=head_dim,
            ffn_dim=_ffn_dim(params),
            rope_theta=float(params.get("rope_theta", 10_000.0)),
            rope_scaling=_rope_scaling(params, tied),
            norm_eps=float(params["norm_eps"]),
            tied_embeddings=tied,
            max_position=131_072 if scaled else 8192,
        )
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError,
            ZeroDivisionError, OverflowError) as error:  # fmt: skip
        raise ValueError(f"{path} cannot be understood: {type(error).__name__} {error}") from None
    refused = [key for key in ("quantization_args", "lora_args", "moe_args", "vision_chunk_size") if params.get(key)]
    if refused:
        raise ValueError(f"{path} describes a model that this Llama does not compute: it sets {', '.join(refused)}")
    account(folder, parameter_shapes(config), tensors)
    return Weights(folder, config, tensors)


def _ffn_dim(params: dict) -> int:
    """Width of the feed-forward: two thirds of 4 x dim, scaled, rounded up (``FeedForward`` in llama-models)."""
    width = int(2 * 4 * params["dim"] / 3)
    if params.get("ffn_dim_multiplier") is not None:
        width = int(params["ffn_dim_multiplier"] * width)
    multiple = params["multiple_of"]
    return -(-width // multiple) * multiple


def _rope_scaling(params: dict, tied: bool) -> RopeScaling | None:
    """Meta's files say that frequencies are scaled, not by how much: 8 in Llama 3.1 and 3.3, 32 in Llama 3.2, whose
    text models (1B and 3B) are those with a tied output. A ``rope_scaling_factor`` in params.json is followed.
    """
    if not params.get("use_scaled_rope"):
        return None
    factor = params.get("rope_scaling_factor")
    return RopeScaling((32.0 if tied else 8.0) if factor is None else float(factor))


def _open_piece(file: Path) -> dict[str, Tensor]:
    try:
        piece = torch.load(file, map_location="cpu", mmap=True, weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError, OSError) as error:
        raise ValueError(f"{file} cannot be read: {' '.join(str(error).split())[:200]}") from None
    dense = isinstance(piece, dict) and all(
        isinstance(value, Tensor) and value.layout == torch.strided and value.device.type == "cpu" and value.ndim > 0
        for value in piece.values()
    )
    if not dense:
        raise ValueError(f"{file} is not a piece of Meta's weights: it holds something else than named dense tensors")
    piece.pop("rope.freqs", None)  # follows from the parameters
    return piece


def _join(folder: Path, pieces: list[dict[str, Tensor]], dim: int, head_dim: int) -> dict[str, PiecedTensor]:
    keys = pieces[0].keys()
    for number, piece in enumerate(pieces):
        if piece.keys() != keys:
            odd = sorted(piece.keys() ^ keys)[:8]
            raise ValueError(f"{folder}: consolidated.{number:02d}.pth holds other tensors than 00: {', '.join(odd)}")
    tensors = {}
    for key in keys:
        parts = tuple(piece[key] for piece in pieces)
        module = key.split(".")[-2] if "." in key else key
        kinds = {(part.dtype, part.ndim) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"{folder}: {key} differs between the pieces: {sorted(map(str, kinds))}")
        if parts[0].ndim < 2:
            if not all(torch.equal(part, parts[0]) for part in parts):
                raise ValueError(f"{folder}: {key} differs between the pieces, which should all hold the same")
            tensors[key] = PiecedTensor(parts[:1], 0)
            continue
        axis = _AXES.get(module, 0)
        if module == "tok_embeddings":
            axis = 0 if parts[0].shape[1] == dim else 1
        if len({part.shape[:axis] + part.shape[axis + 1 :] for part in parts}) > 1:
            shapes = ", ".join(str(tuple(part.shape)) for part in parts)
            raise ValueError(f"{folder}: the pieces of {key} do not fit together: {shapes}")
        tensors[key] = PiecedTensor(parts, axis, head_dim if module in ("wq", "wk") else 0)
    return tensors
