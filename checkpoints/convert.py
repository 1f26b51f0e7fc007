"""Checkpoints to and from other forms, in one process: no process group, no GPU, and no whole model in memory.

This is the one module of the package that knows the model.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from checkpoints.folders import ONE_FILE, assets, read_manifest, verify, write_manifest
from llama.config import LlamaConfig
from llama.hf import (
    DTYPES,
    MAX_SHARD_BYTES,
    account,
    common_dtype,
    dtype_name,
    open_weights,
    parameter_shapes,
    whole_folder,
    write_hf,
)
from llama.model import Llama

_PREFIX = "model."  # Fabric saves the state {"model": model, ...}, and keys are flattened with dots


class CheckpointWeights:
    """The weights of a checkpoint of any mesh, every file verified and every tensor accounted for.

    Args:
        check_files: compare every file with its checksum; of many ranks, one is enough.

    Raises:
        FileNotFoundError, ValueError: as ``checkpoints.verify``, or the tensors are not those of the model.
    """

    def __init__(self, path: str | Path, check_files: bool = True) -> None:
        self.path = Path(path)
        self.manifest = verify(self.path) if check_files else read_manifest(self.path)
        try:
            self.config = LlamaConfig.from_dict(self.manifest["model"])
            self._one_file = (self.path / ONE_FILE).is_file()
            if self._one_file:
                self._whole = torch.load(self.path / ONE_FILE, map_location="cpu", mmap=True, weights_only=True)[
                    "model"
                ]
                self._stored = {key: _Stored(tuple(t.shape), t.dtype) for key, t in self._whole.items()}
            else:
                self._reader = _Reader(self.path)
                self._stored = {
                    key.removeprefix(_PREFIX): _Stored(tuple(entry.size), entry.properties.dtype)
                    for key, entry in self._reader.read_metadata().state_dict_metadata.items()
                    if key.startswith(_PREFIX) and isinstance(entry, TensorStorageMetadata)
                }
        except (TypeError, AttributeError, pickle.UnpicklingError, EOFError) as error:
            raise ValueError(f"{self.path} is damaged: {type(error).__name__} {error}") from None
        account(self.path, parameter_shapes(self.config), self._stored)

    @property
    def dtype(self) -> torch.dtype:
        """The type that the weights are stored in; fp32, which holds all of them exactly, where tensors differ."""
        return common_dtype(stored.dtype for stored in self._stored.values())

    def describe(self) -> dict[str, str]:
        """What a manifest says of the weights that a run started from; ``dtype`` is that of their first import."""
        imported = self.manifest.get("source") or {"dtype": dtype_name(self.dtype)}
        return {"path": str(self.path), "fingerprint": self.fingerprint(), "dtype": imported["dtype"]}

    def fingerprint(self) -> str:
        """What the checkpoint is, as 16 hex digits: a digest of its files' checksums."""
        files = {name: file["sha256"] for name, file in self.manifest["files"].items()}
        return hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def assets(self) -> dict[str, Path]:
        """The files that travel with the weights: name -> path."""
        return assets(self.path)

    def read(self, name: str) -> Tensor:
        """One parameter, whole, as it is stored."""
        if self._one_file:
            return self._whole[name]
        stored = self._stored[name]
        tensor = torch.empty(stored.shape, dtype=stored.dtype)
        self._load({_PREFIX + name: tensor})
        return tensor

    def read_into(self, model: Llama) -> None:
        """Every parameter of an unsharded model, in the model's own type and on its device."""
        if self._one_file:
            for name, parameter in model.named_parameters():
                parameter.detach().copy_(self._whole[name])
            return
        self._load({_PREFIX + name: parameter.detach() for name, parameter in model.named_parameters()})

    def _load(self, state: dict[str, Tensor]) -> None:
        with _quiet(f"{self.path} cannot be read"):
            dcp.load(state, storage_reader=self._reader, no_dist=True)


class _Stored:
    """What a checkpoint says of a tensor."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.shape, self.dtype = shape, dtype


class _Reader(FileSystemReader):
    """Reads the metadata once, not once a tensor."""

    _kept: Metadata | None = None

    def read_metadata(self, *args, **kwargs) -> Metadata:
        if self._kept is None:
            self._kept = super().read_metadata(*args, **kwargs)
        return self._kept


@contextmanager
def _quiet(failure: str) -> Iterator[None]:
    """Without torch's warning that there is no process group, which is the purpose here; its errors as OSError."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        except CheckpointException as error:  # not a subclass of Exception; holds one failure a rank
            reason = next(iter(error.failures.values()))[0]
            raise OSError(f"{failure}: {type(reason).__name__} {reason}") from None


def from_hf(folder: str | Path, out: str | Path) -> Path:
    """Make a checkpoint of weights alone from published weights, in their own types; to start runs from (--init_from).

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError, ValueError: as ``llama.open_weights``; nothing has been written then.
    """
    out = Path(out)
    _must_not_exist(out)
    weights = open_weights(folder)
    with whole_folder(out) as work:
        # mapped from the files: the writer copies one after the other
        state = {
            _PREFIX + name: tensor[tuple(slice(0, n) for n in tensor.shape)] for name, tensor in weights.tensors.items()
        }
        with _quiet(f"{work} cannot be written"):
            dcp.save(state, storage_writer=FileSystemWriter(work), no_dist=True)
        torch.save({}, work / "meta.pt")  # where Fabric looks for what is neither model nor optimizer
        (work / "assets").mkdir()
        for name, path in weights.assets.items():
            shutil.copyfile(path, work / "assets" / name)
        described = {"model": weights.config.to_dict(), "data": {}, "source": weights.describe()}
        write_manifest(work, {"step": 0, "samples": 0, "tokens": 0, "weights_only": True, **described})
    return out


def to_hf(
    checkpoint: str | Path, out: str | Path, dtype: str | None = None, max_shard_bytes: int = MAX_SHARD_BYTES
) -> tuple[Path, str]:
    """Write a checkpoint's weights as a Hugging Face folder; one shard is in memory at a time.

    Args:
        dtype: bf16, fp32 or fp16; by default that of the weights that the run started from, or else as stored.
        max_shard_bytes: of one file; where the weights were imported in shards, those are kept instead.

    Returns:
        The folder, and the dtype chosen.

    Raises:
        FileExistsError: ``out`` exists.
        FileNotFoundError, ValueError: as ``CheckpointWeights``; nothing has been written then.
    """
    _must_not_exist(Path(out))
    weights = CheckpointWeights(checkpoint)
    dtype = dtype or weights.describe()["dtype"]
    if dtype not in DTYPES:
        raise ValueError(f"--dtype {dtype} is not known; choose from {', '.join(DTYPES)}")
    return write_hf(out, weights.config, weights.read, DTYPES[dtype], weights.assets, max_shard_bytes), dtype


def consolidate(checkpoint: str | Path, file: str | Path) -> Path:
    """Write a checkpoint's weights, under this program's names and as stored, to one file.

    FILE.safetensors holds the tensors alone; any other name a dict for ``torch.load(weights_only=True)``: ``model``
    (a state dict), ``config``, ``step``, ``tokens``. The whole model is in memory: this is for small ones.

    Raises:
        FileExistsError: the file exists.
    """
    file = Path(file)
    _must_not_exist(file)
    weights = CheckpointWeights(checkpoint)
    state = {name: weights.read(name) for name in parameter_shapes(weights.config)}
    file.parent.mkdir(parents=True, exist_ok=True)
    handle, partial = tempfile.mkstemp(dir=file.parent, prefix=f".{file.name}.", suffix=".partial")
    os.close(handle)
    try:
        if file.suffix == ".safetensors":
            save_file(state, partial, metadata={"format": "pt"})
        else:
            head = {key: weights.manifest[key] for key in ("step", "tokens")}
            torch.save({"model": state, "config": weights.config.to_dict(), **head}, partial)
        os.chmod(partial, 0o666 & ~_umask())
        os.replace(partial, file)
    except (RuntimeError, SafetensorError) as error:
        raise OSError(f"{file} cannot be written: {error}") from None
    finally:
        Path(partial).unlink(missing_ok=True)
    return file


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _must_not_exist(path: Path) -> None:
    if path.exists() or path.is_symlink():
        raise FileExistsError(f"{path} exists; choose another name, or move it away")
