"""Published weights in and out: Hugging Face folders, opened lazily and written whole or not at all.

`open_weights(folder)` accounts for every tensor before any is read; `load_weights` then hands one after the other to
whoever stores them, as `init_weights` does, so a sharded model takes from disk the part that each rank holds. The
other way, `write_hf` asks for one tensor after the other and writes one shard at a time.
"""

from __future__ import annotations

import glob
import hashlib
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from llama.config import LlamaConfig
from llama.model import Llama

# The module here -> the module there, in the order of transformers' state dict. Both sides turn the pairs (k, k + K/2)
# in RoPE and store (out, in) matrices, so that conversion is this renaming and nothing else.
BLOCK_NAMES = {
    "attention.wq": "self_attn.q_proj",
    "attention.wk": "self_attn.k_proj",
    "attention.wv": "self_attn.v_proj",
    "attention.wo": "self_attn.o_proj",
    "feed_forward.w1": "mlp.gate_proj",
    "feed_forward.w3": "mlp.up_proj",
    "feed_forward.w2": "mlp.down_proj",
    "attention_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SAFETENSORS = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
# What travels with the weights, from an imported folder through checkpoints to an exported one.
ASSETS = (
    "config.json", "generation_config.json", INDEX, "tokenizer.json", "tokenizer.model", "tokenizer_config.json",
    "special_tokens_map.json", "added_tokens.json", "chat_template.jinja",
)  # fmt: skip
MAX_SHARD_BYTES = 5 * 10**9  # the size of published shards


def dtype_name(dtype: torch.dtype) -> str:
    """bf16, fp32 or fp16."""
    return next(name for name, kind in DTYPES.items() if kind == dtype)


def common_dtype(dtypes: Iterable[torch.dtype]) -> torch.dtype:
    """The one type of several tensors, or fp32, which holds the values of all."""
    found = set(dtypes)
    return found.pop() if len(found) == 1 else torch.float32


def hf_names(config: LlamaConfig) -> dict[str, str]:
    """Every parameter's name here -> its name in a Hugging Face folder, in transformers' order."""
    names = {"tok_embeddings": "model.embed_tokens"}
    for layer in range(config.n_layers):
        names |= {f"layers.{layer}.{ours}": f"model.layers.{layer}.{theirs}" for ours, theirs in BLOCK_NAMES.items()}
    names["norm"] = "model.norm"
    if not config.tied_embeddings:
        names["output"] = "lm_head"
    return {f"{ours}.weight": f"{theirs}.weight" for ours, theirs in names.items()}


def parameter_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Every parameter's name and shape, without memory for any."""
    with torch.device("meta"):
        model = Llama(config)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


class StoredTensor(Protocol):
    """A tensor on disk: slicing it, one slice an axis, reads that part alone."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor: ...


@dataclass(frozen=True)
class Weights:
    """A folder of published weights, every tensor accounted for and none read."""

    path: Path
    config: LlamaConfig
    tensors: Mapping[str, StoredTensor]  # by the parameter's name here

    @property
    def dtype(self) -> torch.dtype:
        """The type of the weights on disk; fp32, which holds all of them exactly, where tensors differ."""
        return common_dtype(tensor.dtype for tensor in self.tensors.values())

    @property
    def assets(self) -> dict[str, Path]:
        """The files that travel with the weights: name -> path. An index that is not used is none of them."""
        unused = {INDEX} if (self.path / WEIGHTS).is_file() else set()
        return {name: self.path / name for name in ASSETS if name not in unused and (self.path / name).is_file()}

    def describe(self) -> dict[str, str]:
        """What a checkpoint's manifest says of the weights that a run started from."""
        return {"path": str(self.path), "fingerprint": self.fingerprint(), "dtype": dtype_name(self.dtype)}

    def fingerprint(self) -> str:
        """What the weights are, as 16 hex digits: a digest of the config and of each tensor's type and edge rows.

        Two sets of weights that were trained differently differ everywhere, so the first and last row of each tensor
        tell them apart at no cost; a copy of the folder in other shards has the same fingerprint.
        """
        digest = hashlib.sha256(json.dumps(self.config.to_dict(), sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            for row in (0, tensor.shape[0] - 1):
                edge = tensor[(slice(row, row + 1), *(slice(0, n) for n in tensor.shape[1:]))]
                digest.update(edge.contiguous().view(torch.uint8).numpy().tobytes())
        return digest.hexdigest()[:16]


def open_weights(folder: str | Path) -> Weights:
    """Open a Hugging Face folder, or one in Meta's own layout (``llama.meta``), and account for every tensor in it.

    Raises:
        FileNotFoundError: the folder or one of its files is missing; all missing ones are named.
        ValueError: the config describes another kind of model, or the tensors are not those of the config: missing,
            unknown, of another shape, quantised, or contradicting the tie flag. All of them are listed.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no folder {folder}")
    if not (folder / "config.json").is_file():
        if (folder / "params.json").is_file():
            from llama.meta import open_meta  # it builds on this module

            return open_meta(folder)
        raise FileNotFoundError(f"{folder} holds neither config.json (Hugging Face) nor params.json (Meta)")
    config = LlamaConfig.from_hf(folder)
    found = _find_tensors(folder)
    # transformers before 4.31 stored this buffer; it follows from the config
    found = {key: tensor for key, tensor in found.items() if not key.endswith(".rotary_emb.inv_freq")}
    names, shapes = hf_names(config), parameter_shapes(config)
    head = found.pop("lm_head.weight", None) if config.tied_embeddings else None
    contradiction = ""
    if not config.tied_embeddings and "lm_head.weight" not in found and "model.embed_tokens.weight" in found:
        contradiction = "config.json says tie_word_embeddings false, but there is no lm_head.weight"
    account(folder, {theirs: shapes[ours] for ours, theirs in names.items()}, found, contradiction)
    tensors = {ours: found[theirs] for ours, theirs in names.items()}
    if head is not None and not equal(head, tensors["tok_embeddings.weight"]):
        raise ValueError(
            f"{folder}: config.json says tie_word_embeddings true, but lm_head.weight differs from "
            "model.embed_tokens.weight; set it to false if the output has its own weights"
        )
    return Weights(folder, config, tensors)


def account(
    folder: Path, expected: Mapping[str, tuple[int, ...]], found: Mapping[str, StoredTensor], contradiction: str = ""
) -> None:
    """Compare the tensors of a folder with those that its config asks for.

    Raises:
        ValueError: they differ; every kind of difference is listed.
    """
    wrong = {
        "missing": [key for key in expected if key not in found],
        "unknown": [key for key in found if key not in expected],
        "of another shape": [
            f"{key} is {tuple(found[key].shape)}, not {shape}"
            for key, shape in expected.items()
            if key in found and tuple(found[key].shape) != shape
        ],
        "quantised or of another type": [
            f"{key} is {tensor.dtype}"
            for key, tensor in found.items()
            if key in expected and tensor.dtype not in DTYPES.values()
        ],
    }
    listed = [contradiction] if contradiction else []
    for kind, keys in wrong.items():
        if keys:
            more = f" and {len(keys) - 8} more" if len(keys) > 8 else ""
            listed.append(f"{len(keys)} {kind}: {', '.join(keys[:8])}{more}")
    if listed:
        raise ValueError(f"the tensors in {folder} are not those of its config: {'; '.join(listed)}")


def equal(a: StoredTensor, b: StoredTensor) -> bool:
    """Whether two matrices on disk are equal to the last bit; reads some rows at a time."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    rows, columns = a.shape
    step = max(1, 2**22 // columns)
    parts = ((slice(r, min(r + step, rows)), slice(0, columns)) for r in range(0, rows, step))
    return all(torch.equal(a[part], b[part]) for part in parts)


@dataclass(frozen=True)
class SafetensorsTensor:
    """A tensor of a safetensors file. The file is mapped anew for each read, so that read pages do not add up."""

    file: Path
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    def __getitem__(self, part: tuple[slice, ...]) -> Tensor:
        with safe_open(self.file, framework="pt") as file:
            return file.get_slice(self.key)[part]


def _find_tensors(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the safetensors files of a folder, by its key."""
    if (folder / WEIGHTS).is_file():
        files, index = [WEIGHTS], None
    elif (folder / INDEX).is_file():
        index = _read_index(folder / INDEX)
        files = sorted(set(index.values()))
        lost = [name for name in files if not (folder / name).is_file()]
        if lost:
            raise FileNotFoundError(f"{folder} lacks {len(lost)} of the {len(files)} files of its index: {lost}")
    else:
        others = sorted(p.name for pattern in ("*.bin", "*.pth", "*.pt") for p in folder.glob(pattern))
        raise FileNotFoundError(
            f"{folder} holds neither {WEIGHTS} nor {INDEX}"
            + (f" (it holds {', '.join(others)}, which this program does not read)" if others else "")
        )
    found: dict[str, StoredTensor] = {}
    for name in files:
        try:
            with safe_open(folder / name, framework="pt") as file:
                for key in file.keys():  # noqa: SIM118 (not a dict)
                    if index is not None and index.get(key) != name:
                        said = f"belongs to {index[key]}" if key in index else "does not exist"
                        raise ValueError(f"{folder / name} holds {key}, which according to {INDEX} {said}")
                    stored = file.get_slice(key)
                    kind = _SAFETENSORS.get(stored.get_dtype(), stored.get_dtype())
                    found[key] = SafetensorsTensor(folder / name, key, tuple(stored.get_shape()), kind)
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is damaged: {error}") from None
    return found


def _read_index(path: Path) -> dict[str, str]:
    """Which file of its folder each tensor is in.

    Raises:
        ValueError: the index is damaged, or names something else than safetensors files beside it.
    """
    try:
        files = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        if all(Path(name).name == name and name.endswith(".safetensors") for name in files.values()):
            return files
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is damaged: {type(error).__name__} {error}") from None
    raise ValueError(f"{path} names something else than .safetensors files in its own folder")


@torch.no_grad()
def load_weights(model: Llama, weights: Weights, write: Callable[[Tensor, Any], object] | None = None) -> None:
    """Give every parameter its published value, one after the other; the counterpart of ``init_weights``.

    Args:
        model: of ``weights.config``'s shape, on a real device.
        write: stores the part of a tensor on disk that this process holds, such as ``parallel.write_shard``;
            by default all of it.
    """
    for name, parameter in model.named_parameters():
        stored = weights.tensors[name]
        if write is None:
            parameter.copy_(stored[tuple(slice(0, n) for n in stored.shape)])
        else:
            write(parameter, stored)


def load_hf(folder: str | Path, device: torch.device | str = "cpu", dtype: torch.dtype | None = None) -> Llama:
    """The model in a folder of published weights, on one device.

    Args:
        folder: Hugging Face's or Meta's layout.
        dtype: of the parameters; by default that of the files.

    Raises:
        FileNotFoundError, ValueError: as ``open_weights``, before any memory is taken.
    """
    weights = open_weights(folder)
    model = empty_model(weights.config, device, dtype or weights.dtype)
    load_weights(model, weights)
    return model


def empty_model(config: LlamaConfig, device: torch.device | str, dtype: torch.dtype) -> Llama:
    """A model with memory for its weights but no values."""
    with torch.device("meta"):
        model = Llama(config)
    return model.to(dtype).to_empty(device=device)


def save_hf(model: Llama, folder: str | Path, dtype: torch.dtype | None = None) -> Path:
    """Write an unsharded model as a Hugging Face folder. For a sharded one: save a checkpoint, then
    ``python -m checkpoints to-hf``.

    Args:
        folder: must not exist.
        dtype: of every tensor and of config.json; by default the parameters' own.
    """
    parameters = dict(model.named_parameters())
    if any(hasattr(p, "full_tensor") for p in parameters.values()):
        raise ValueError("the model is sharded over a mesh; save a checkpoint and export that")
    dtype = dtype or common_dtype(p.dtype for p in parameters.values())
    return write_hf(folder, model.config, lambda name: parameters[name].detach(), dtype, {})


def write_hf(
    folder: str | Path,
    config: LlamaConfig,
    read: Callable[[str], Tensor],
    dtype: torch.dtype,
    assets: Mapping[str, Path],
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> Path:
    """Write a Hugging Face folder: complete under its name, or absent. At most one shard is in memory.

    Args:
        read: a parameter's whole value by its name here, in any float type, on any device.
        dtype: of every tensor written, and what config.json says.
        assets: files of an imported folder (see ``ASSETS``) that are carried through. A config.json among them keeps
            all that it says beyond the dtype; an index keeps its division into shards.

    Raises:
        FileExistsError: the folder exists.
    """
    with whole_folder(folder) as work:
        for name, path in assets.items():
            if name not in ("config.json", INDEX):
                shutil.copyfile(path, work / name)
        if "generation_config.json" not in assets:
            _write_json(work / "generation_config.json", {"_from_model_config": True})
        _write_config(work, config, dtype, assets.get("config.json"))
        plan, index = _plan_shards(config, dtype, assets.get(INDEX), max_shard_bytes)
        for file, names in plan.items():
            shard = {theirs: read(ours).to("cpu", dtype).contiguous() for ours, theirs in names.items()}
            try:
                save_file(shard, work / file, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{work / file} cannot be written: {error}") from None
            del shard
            (work / file).chmod((work / "config.json").stat().st_mode)  # safetensors leaves it to its owner alone
        if index is not None:
            _write_json(work / INDEX, index)
    return Path(folder)


@contextmanager
def whole_folder(folder: str | Path) -> Iterator[Path]:
    """A folder to fill, which gets its name when everything in it is on disk, and is removed if that fails.

    What killed attempts at the same folder on this machine left behind is removed first.

    Raises:
        FileExistsError: the folder exists.
    """
    folder = Path(folder)
    if folder.exists() or folder.is_symlink():
        raise FileExistsError(f"{folder} exists; choose another name, or move it away")
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}.{socket.gethostname()}-"
    for path in folder.parent.glob(f"{glob.escape(prefix)}*.partial"):
        pid = path.name[len(prefix) : -len(".partial")]
        if pid.isdigit() and not Path(f"/proc/{pid}").exists() and Path("/proc").is_dir():
            shutil.rmtree(path, ignore_errors=True)
    work = folder.parent / f"{prefix}{os.getpid()}.partial"
    work.mkdir()
    try:
        yield work
        for path in (*work.rglob("*"), work):
            _sync(path)
        work.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _plan_shards(
    config: LlamaConfig, dtype: torch.dtype, carried_index: Path | None, max_bytes: int
) -> tuple[dict[str, dict[str, str]], dict | None]:
    """Which tensors go into which file: (file -> name here -> name there, index or None for a single file).

    An imported index is followed where it still fits; else shards are filled in order, as transformers fills them.
    """
    names, shapes = hf_names(config), parameter_shapes(config)
    sizes = {name: torch.Size(shapes[name]).numel() * dtype.itemsize for name in names}
    total = sum(sizes.values())
    if carried_index is not None:
        files = _read_index(carried_index)
        index = json.loads(carried_index.read_text())
        metadata = index.get("metadata")
        if files.keys() == set(names.values()) and isinstance(metadata, dict) and metadata.get("total_size") == total:
            plan: dict[str, dict[str, str]] = {}
            for ours, theirs in names.items():
                plan.setdefault(files[theirs], {})[ours] = theirs
            return plan, index
    shards: list[dict[str, str]] = [{}]
    used = 0
    for ours, theirs in names.items():
        if shards[-1] and used + sizes[ours] > max_bytes:
            shards.append({})
            used = 0
        shards[-1][ours] = theirs
        used += sizes[ours]
    if len(shards) == 1:
        return {WEIGHTS: shards[0]}, None
    plan = {f"model-{i:05d}-of-{len(shards):05d}.safetensors": shard for i, shard in enumerate(shards, 1)}
    weight_map = {theirs: file for file, shard in plan.items() for theirs in shard.values()}
    return plan, {"metadata": {"total_size": total}, "weight_map": weight_map}


def _write_config(work: Path, config: LlamaConfig, dtype: torch.dtype, carried: Path | None) -> None:
    name = str(dtype).removeprefix("torch.")
    if carried is None:
        said = json.loads((work / "generation_config.json").read_text())
        special = {key: said[key] for key in ("bos_token_id", "eos_token_id") if key in said}
        _write_json(work / "config.json", {**config.to_hf(), **special, "torch_dtype": name})
        return
    hf = json.loads(carried.read_text())
    key = "dtype" if "dtype" in hf else "torch_dtype"  # transformers 5 writes the first, earlier versions the second
    if hf.get(key) == name:
        shutil.copyfile(carried, work / "config.json")
    else:
        _write_json(work / "config.json", {**hf, key: name})


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")  # as transformers writes it


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
