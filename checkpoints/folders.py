"""Checkpoint folders: published whole or not at all, found, verified, retired, and a run resumed from them.

RUN/checkpoints/step-00000200/    complete: a folder gets this name only after everything in it is on disk
    __0_0.distcp ... .metadata    model and optimizer shards, written by torch.distributed.checkpoint
    meta.pt                       progress: step, samples, tokens, RNG states
    checkpoint.pt                 or instead of these three, all of it in one file from rank 0, for plain torch.load
    assets/                       config.json, tokenizer and the like, which travel with the weights to an export
    manifest.json                 what the checkpoint is of, and size and sha256 of every other file
RUN/checkpoints/.step-00000200.partial/   a save that has not ended; it never counts
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

if TYPE_CHECKING:
    from lightning.fabric import Fabric

MANIFEST = "manifest.json"
ONE_FILE = "checkpoint.pt"
_ASSETS = "assets"
FORMAT = "fabric-llama checkpoint"
VERSION = 1
_NAME = re.compile(r"step-(\d{8,})")


def save(
    fabric: Fabric,
    folder: str | Path,
    model: nn.Module,
    optimizer: Optimizer,
    progress: dict[str, Any],
    described: dict[str, Any],
    files: Mapping[str, bytes] | None = None,
    distributed: bool = True,
) -> Path:
    """Save a checkpoint and publish it as ``folder/step-NNNNNNNN``; called by all ranks together.

    Args:
        folder: the run's checkpoint folder.
        progress: plain values; ``progress["step"]`` names the checkpoint. RNG states are added.
        described: what the manifest says the checkpoint is of (model, data, mesh); ``load`` callers compare it.
        distributed: shards of every rank, or one file from rank 0, which holds the whole state in host memory then; the
            strategy's ``save_distributed_checkpoint`` must say the same.
        files: rank 0's, that travel with the weights: name -> content.

    Returns:
        The published folder.

    Raises:
        TypeError: ``progress`` holds something that ``torch.load(weights_only=True)`` would refuse; nothing is written.
        OSError: it could not be written, on any rank; every rank raises, and the folder is as it was before.
        FloatingPointError: a parameter is not finite; every rank raises, nothing is written.
    """
    _check_plain(progress, "progress")
    _check_finite(fabric, model)
    folder = Path(folder)
    final = folder / f"step-{progress['step']:08d}"
    partial = folder / f".{final.name}.partial"
    if fabric.is_global_zero:
        if partial.exists():  # of a save that was killed
            shutil.rmtree(partial)
        partial.mkdir(parents=True)
    state = {"model": model, "optimizer": optimizer, "progress": {**progress, "rng": _all_rng_states()}}
    fresh = not optimizer.state
    fabric.barrier()
    problem = None
    try:
        # ends with a barrier: every shard is written, or the one file
        fabric.save(partial if distributed else partial / ONE_FILE, state)
    except CheckpointException as error:  # of the shards: every rank has it
        problem = "; ".join(f"rank {rank}: {reason[0]}" for rank, reason in error.failures.items())
    except Exception as error:  # of meta.pt: rank 0 alone, while the others wait at the barrier
        problem = f"rank {fabric.global_rank}: {error}"
        fabric.barrier()
    if fresh:
        optimizer.state.clear()  # saving a fresh optimizer makes state for it, with a step counter of 1
    if fabric.is_global_zero and problem is None:
        try:
            (partial / _ASSETS).mkdir()
            for name, content in (files or {}).items():
                (partial / _ASSETS / name).write_bytes(content)
            head = {key: progress[key] for key in ("step", "samples", "tokens")}
            publish(partial, final, {**head, **described})
        except OSError as error:
            problem = f"rank 0: {error}"
    problems: list[str | None] = [None] * fabric.world_size
    dist.all_gather_object(problems, problem)
    problem = next((p for p in problems if p is not None), None)
    if problem is not None:
        if fabric.is_global_zero:
            shutil.rmtree(partial, ignore_errors=True)
        fabric.barrier()
        raise OSError(f"the checkpoint of step {progress['step']} could not be written to {folder}: {problem}")
    return final


def _check_plain(value: Any, place: str) -> None:
    """Refuse what a checkpoint could hold but not give back.

    Raises:
        TypeError: naming the place in the state and the type.
    """
    if isinstance(value, torch.Tensor) or type(value) in (bool, int, float, str, type(None)):
        return
    if type(value) is dict:
        for key, inner in value.items():
            _check_plain(key, f"{place}, a key")
            _check_plain(inner, f"{place}[{key!r}]")
    elif type(value) in (list, tuple):
        for i, inner in enumerate(value):
            _check_plain(inner, f"{place}[{i}]")
    else:
        raise TypeError(f"{place} is a {type(value).__module__}.{type(value).__qualname__}; save plain values")


@torch.no_grad()
def _check_finite(fabric: Fabric, model: nn.Module) -> None:
    """Refuse to keep weights that no training can go on from.

    Raises:
        FloatingPointError: on every rank, naming a parameter of the first rank that found one.
    """
    bad = next((name for name, p in model.named_parameters() if not _local(p).isfinite().all()), None)
    found: list[str | None] = [None] * fabric.world_size
    dist.all_gather_object(found, bad)
    names = [name for name in found if name is not None]
    if names:
        raise FloatingPointError(f"parameter {names[0]} is not finite; no checkpoint is written of it")


def _local(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def publish(partial: Path, final: Path, described: dict[str, Any]) -> None:
    """Give a finished folder its manifest and its name, with everything in it on disk first; called by one process."""
    write_manifest(partial, described)
    for path in partial.rglob("*"):
        _sync(path)
    _sync(partial)
    if final.exists():  # a damaged one of the same step that the run stepped over
        _delete(final)
    partial.rename(final)
    _sync(final.parent)


def write_manifest(folder: Path, described: dict[str, Any]) -> None:
    """Write the manifest of a folder: what it is of, and size and sha256 of every file in it."""
    files = {
        str(path.relative_to(folder)): {"size": path.stat().st_size, "sha256": _sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = {"format": FORMAT, "version": VERSION, **described, "files": files}
    manifest["own_sha256"] = _own_sha256(manifest)
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1) + "\n")


def _own_sha256(manifest: dict[str, Any]) -> str:
    """The checksum of a manifest's content, without the checksum."""
    content = {key: value for key, value in manifest.items() if key != "own_sha256"}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def load(fabric: Fabric, path: str | Path, model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    """Load a checkpoint of any mesh into a sharded model and its optimizer; called by all ranks together.

    Hyperparameters of the optimizer (learning rate, decay, betas) stay those of the optimizer given: a new
    configuration holds. RNG states are restored where the number of ranks is that of the save.

    Returns:
        The ``progress`` that was saved, without the RNG states.
    """
    configured = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "progress": {}}
    fabric.load(_loadable(path), state, weights_only=True)
    for group, values in zip(optimizer.param_groups, configured, strict=True):
        group.update(values)
    if state["progress"]["step"] == 0:
        optimizer.state.clear()  # saved before any step: see `save`
    progress = state["progress"]
    states = progress.pop("rng")
    if len(states) == fabric.world_size:
        _set_rng_state(states[fabric.global_rank])
    return progress


def load_model(fabric: Fabric, path: str | Path, model: nn.Module) -> None:
    """Load the weights alone of a checkpoint of any mesh into a sharded model; called by all ranks together."""
    fabric.load(_loadable(path), {"model": model}, weights_only=True)


def _loadable(path: str | Path) -> Path:
    """What of a checkpoint Fabric loads: the folder of shards, or the one file."""
    one = Path(path) / ONE_FILE
    return one if one.is_file() else Path(path)


def assets(path: str | Path) -> dict[str, Path]:
    """The files of a checkpoint that travel with its weights: name -> path."""
    return {file.name: file for file in sorted((Path(path) / _ASSETS).glob("*")) if file.is_file()}


def steps(folder: str | Path) -> list[tuple[int, Path]]:
    """The complete checkpoints of a folder as (step, path), oldest first; anything else in it is passed over."""
    found = []
    for path in Path(folder).glob("step-*"):
        match = _NAME.fullmatch(path.name)
        if match and (path / MANIFEST).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def newest_good(folder: str | Path) -> tuple[Path | None, list[str]]:
    """The newest checkpoint of a folder that is whole, every file compared with its manifest, or None; and what is
    wrong with each newer one."""
    wrong = []
    for _, path in reversed(steps(folder)):
        try:
            verify(path)
            return path, wrong
        except (ValueError, OSError) as error:
            wrong.append(str(error))
    return None, wrong


def set_aside(folder: str | Path, good: Path) -> None:
    """Take the name from checkpoints newer than a good one, so that nothing counts them; called by one process."""
    for _, path in steps(folder):
        if path.name > good.name:
            aside = path.with_name(f"damaged-{path.name}")
            if aside.exists():
                shutil.rmtree(aside)
            path.rename(aside)


def latest(folder: str | Path) -> Path | None:
    """The newest complete checkpoint of a run's checkpoint folder, or None."""
    found = steps(folder)
    return found[-1][1] if found else None


def read_manifest(path: str | Path) -> dict[str, Any]:
    """A checkpoint's manifest.

    Raises:
        FileNotFoundError: there is no complete checkpoint at that path.
        ValueError: the manifest is damaged, or of another program or version.
    """
    file = Path(path) / MANIFEST
    if not file.is_file():
        raise FileNotFoundError(f"{path} is not a complete checkpoint: it holds no {MANIFEST}")
    try:
        manifest = json.loads(file.read_text(encoding="utf-8"))
        found = manifest["format"], manifest["version"]
        files = manifest["files"]
        whole = manifest["own_sha256"] == _own_sha256(manifest)
        whole = whole and all(type(manifest[key]) is int for key in ("step", "samples", "tokens"))
        shards = {".metadata", "meta.pt"} <= files.keys() and any(name.endswith(".distcp") for name in files)
        whole = whole and (shards or ONE_FILE in files)
        whole = whole and all(isinstance(manifest[part], dict) for part in ("model", "data"))
        whole = whole and all(isinstance(manifest.get(part) or {}, dict) for part in ("mesh", "source"))
        whole = whole and not any(Path(name).is_absolute() or ".." in Path(name).parts for name in files)
        whole = whole and all(type(f["size"]) is int and isinstance(f["sha256"], str) for f in files.values())
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"{file} is damaged: {type(e).__name__} {e}") from None
    if found != (FORMAT, VERSION):
        raise ValueError(
            f"{file} says format {found[0]!r}, version {found[1]}; this program reads {FORMAT!r}, {VERSION}"
        )
    if not whole:
        raise ValueError(f"{file} is damaged: it does not describe a whole checkpoint, or has been changed")
    return manifest


def verify(path: str | Path) -> dict[str, Any]:
    """Compare every file of a checkpoint with its manifest, and return the manifest.

    Raises:
        FileNotFoundError: no complete checkpoint, or a file is missing.
        ValueError: the manifest or a file is damaged; the message names the file and both values.
    """
    path = Path(path)
    manifest = read_manifest(path)
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise FileNotFoundError(f"{file} is missing; the manifest names it")
        if file.stat().st_size != expected["size"]:
            raise ValueError(
                f"{file} is damaged: it has {file.stat().st_size:,} bytes, the manifest says {expected['size']:,}"
            )
        found = _sha256(file)
        if found != expected["sha256"]:
            raise ValueError(f"{file} is damaged: sha256 {found[:12]}..., manifest {expected['sha256'][:12]}...")
    return manifest


def retire(folder: str | Path, keep_last: int, keep_every: int, source: Path | None = None) -> None:
    """Delete checkpoints that are no longer wanted; called by one process.

    Args:
        keep_last: how many of the newest to keep; -1 keeps all.
        keep_every: steps that are multiples of it stay for good; 0: none.
        source: a checkpoint that the run was resumed from; it stays too.
    """
    if keep_last < 0:
        return
    for step, path in steps(folder)[: -keep_last or None]:
        if (keep_every and step % keep_every == 0) or (source and path.resolve() == source.resolve()):
            continue
        _delete(path)


def sweep(folder: str | Path) -> None:
    """Remove what saves and deletions that were killed left behind; called by one process, before training."""
    for path in Path(folder).glob(".step-*"):
        if path.name.endswith((".partial", ".deleted")):
            shutil.rmtree(path)


def _delete(path: Path) -> None:
    """Delete a checkpoint: first its name, so that there is never half a folder under a complete one's."""
    doomed = path.with_name(f".{path.name}.deleted")
    path.rename(doomed)
    shutil.rmtree(doomed)


def _all_rng_states() -> list[dict[str, Any]]:
    """Every rank's generators as plain values and tensors, which `torch.load(weights_only=True)` reads."""
    numpy_state = np.random.get_state()
    own = {
        "python": random.getstate(),
        "numpy": [numpy_state[0], numpy_state[1].tolist(), *map(float, numpy_state[2:])],
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state().cpu() if torch.cuda.is_available() else None,
    }
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, own)
    return states


def _set_rng_state(state: dict[str, Any]) -> None:
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(2**20):
            digest.update(block)
    return digest.hexdigest()


def _sync(path: Path) -> None:
    """Force a file or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
