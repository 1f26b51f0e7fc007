"""What the worker processes of conftest.py run: each function here is a job, called on every rank of a group."""

import contextlib
import csv
import ctypes
import gc
import hashlib
import io
import os
import random
import resource
import signal
import sys
import traceback
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import loss_parallel

import checkpoints
import data
import fabric_train
import llama.model
from checkpoints.convert import to_hf
from llama import Llama, LlamaConfig, init_weights, load_weights, open_weights
from parallel import parallelize, plain, write_shard

BATCH, LENGTH = 8, 64


def small_config(tied: bool, **changes) -> LlamaConfig:
    return replace(LlamaConfig.preset("tiny"), tied_embeddings=tied, **changes)


def mask_some(window: int, labels: torch.Tensor) -> torch.Tensor:
    """Ragged labels: a run of each window's labels is ignored, its length a function of the window; some windows
    have no valid label at all."""
    labels = labels.clone()
    labels[: (window * 37) % (len(labels) + 8)] = data.IGNORED
    return labels


def received(arguments: list[str]) -> list[str]:
    """The real program in this process: a digest of each row of ids that reached this rank's loop, in order."""
    rows: list[str] = []
    real = fabric_train.load

    def load(*args):
        for micro_batch in real(*args):
            rows.extend(hashlib.sha256(row.numpy().tobytes()).hexdigest() for row in micro_batch[0])
            yield micro_batch

    fabric_train.load = load
    try:
        fabric_train.main(arguments)
    finally:
        fabric_train.load = real
        if dist.is_initialized():
            dist.destroy_process_group()
    return rows


def training(arguments: list[str], ragged: bool = False) -> dict:
    """The real program in this process. Returns metrics.csv's rows, and the ids of every sample this rank was given."""
    given: list[tuple[int, str]] = []
    real_shuffled, real_tokens = data.Shuffled.__getitem__, data.TokenDataset.__getitem__

    def record(self, sample):
        inputs, labels, source = real_shuffled(self, sample)
        given.append((sample, hashlib.sha256(inputs.numpy().tobytes()).hexdigest()))
        return inputs, labels, source

    def mask(self, window):
        inputs, labels = real_tokens(self, window)
        return inputs, mask_some(window, labels) if self.split == "train" else labels

    data.Shuffled.__getitem__ = record
    if ragged:
        data.TokenDataset.__getitem__ = mask
    try:
        fabric_train.main(arguments)
    finally:
        data.Shuffled.__getitem__, data.TokenDataset.__getitem__ = real_shuffled, real_tokens
        if dist.is_initialized():
            dist.destroy_process_group()
    out = Path(arguments[arguments.index("--out") + 1])
    with (out / "metrics.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    return {"rows": rows, "given": given}


def dtypes_inside(arguments: list[str]) -> dict[str, str]:
    """Where a run computes in which precision: taken from inside a block, and from the optimizer's step."""
    found = {}
    real_layer, real_step = llama.model.Block.layer, torch.optim.AdamW.step

    def layer(self, x, cos, sin, cache, mask):
        found.update(
            residual=x.dtype,
            norm=self.attention_norm(x).dtype,
            weight=self.attention.wq.weight.dtype,
            tables=cos.dtype,
            autocast=torch.is_autocast_enabled(x.device.type),
        )
        return real_layer(self, x, cos, sin, cache, mask)

    def step(self, *args, **kwargs):
        weight = self.param_groups[0]["params"][0]
        result = real_step(self, *args, **kwargs)
        found.update(master=weight.dtype, gradient=weight.grad.dtype, moment=self.state[weight]["exp_avg"].dtype)
        return result

    llama.model.Block.layer, torch.optim.AdamW.step = layer, step
    try:
        training(arguments)
    finally:
        llama.model.Block.layer, torch.optim.AdamW.step = real_layer, real_step
    return {name: str(value).removeprefix("torch.") for name, value in found.items()}


def sharded_model(mesh_shape: tuple[int, int], tied: bool, recompute: str, compile: bool, seed: int = 5) -> tuple:
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    with torch.device("meta"):
        model = Llama(small_config(tied))
    parallelize(model, mesh, recompute=recompute, compile=compile)
    model.to_empty(device="cpu")
    init_weights(model, seed, write_shard)
    return model, mesh


def gradients(mesh_shape: tuple[int, int], variants: list[tuple[bool, str, bool]], tokens: torch.Tensor) -> list[dict]:
    """For each (tied, recompute, compile): digests of the initial weights, the summed loss, and whole gradients."""
    dist.init_process_group("gloo")
    answers = []
    for tied, recompute, compile in variants:
        torch._dynamo.reset()
        model, mesh = sharded_model(mesh_shape, tied, recompute, compile)
        weights = {name: plain(p.detach()) for name, p in model.named_parameters()}
        digests = {name: hashlib.sha256(w.contiguous().numpy().tobytes()).hexdigest() for name, w in weights.items()}
        axis = mesh["data_parallel"]
        share = len(tokens) // axis.size()
        mine = tokens[axis.get_local_rank() * share :][:share]
        inputs, labels = mine[:, :-1], mine[:, 1:]
        logits = model(inputs)
        with loss_parallel():
            loss = fabric_train.token_losses(logits, labels).sum()
            loss.backward()
        whole = {name: plain(p.grad).numpy() for name, p in model.named_parameters()}
        local = {name: plain(p.grad).shape for name, p in model.named_parameters()}
        assert local == {name: p.shape for name, p in weights.items()}
        total = plain(loss.detach()).clone()
        dist.all_reduce(total, group=axis.get_group())
        norm = plain(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]))
        keys = sorted(model.state_dict())
        answers.append(
            {
                "digests": digests,
                "loss": total.item(),
                "gradients": whole if dist.get_rank() == 0 else None,
                "norm": norm.item(),
                "keys": keys,
                "logits_local": tuple(getattr(logits, "to_local", lambda x=logits: x)().shape),
            }
        )
    dist.barrier()
    dist.destroy_process_group()
    return answers


def plain_gradients(tied: bool, tokens: torch.Tensor, seed: int = 5) -> dict:
    """The reference: one process, no wrapper, no mesh."""
    model = Llama(small_config(tied))
    init_weights(model, seed)
    loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum")
    loss.backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    return {
        "digests": {n: hashlib.sha256(p.detach().numpy().tobytes()).hexdigest() for n, p in model.named_parameters()},
        "loss": loss.item(),
        "gradients": {name: g.numpy() for name, g in grads.items()},
        "norm": torch.nn.utils.get_total_norm(grads.values()).item(),
        "keys": sorted(model.state_dict()),
    }


def refused(arguments: list[str]) -> tuple[int, str]:
    """The exit code of a call and what it said after Lightning's banner; fails if a model was built."""
    heard = io.StringIO()
    real = fabric_train.Llama, fabric_train.time.sleep

    def build(*_):
        raise AssertionError("a model was built before the call was refused")

    fabric_train.Llama, fabric_train.time.sleep = build, lambda seconds: None
    try:
        with contextlib.redirect_stderr(heard):
            fabric_train.main(arguments)
    except SystemExit as end:
        return end.code, heard.getvalue().split("-" * 100 + "\n\n")[-1]
    finally:
        fabric_train.Llama, fabric_train.time.sleep = real
    return 0, heard.getvalue()


def optimizer_and_generators(folder: str) -> dict:
    """Save after one step, step on, load into a fresh model: what comes back, and the random numbers that follow."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def cut(model, mesh):
        parallelize(model, mesh)
        model.to_empty(device="cpu")
        init_weights(model, 0, write_shard)
        return model

    strategy = ModelParallelStrategy(cut, data_parallel_size=2, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=2, strategy=strategy)
    fabric.launch()

    def build(lr: float, decay: float):
        with fabric.init_module(empty_init=True):
            model = Llama(small_config(tied=False))
        model = fabric.setup(model)
        options = fabric_train.OptimizerOptions(lr=lr, weight_decay=decay)
        return model, fabric.setup_optimizers(fabric_train.make_optimizer(model, options))

    def step(model, optimizer):
        with loss_parallel():
            fabric.backward(fabric_train.token_losses(model(tokens[:, :-1]), tokens[:, 1:]).sum())
        optimizer.step()
        optimizer.zero_grad()

    def digest(model):
        return [hashlib.sha256(plain(p.detach()).numpy().tobytes()).hexdigest() for p in model.parameters()]

    def draw():
        return random.random(), float(np.random.random()), torch.rand(()).item()

    tokens = torch.randint(0, 320, (2, 33), generator=torch.Generator().manual_seed(fabric.global_rank))
    model, optimizer = build(lr=1e-2, decay=0.1)
    step(model, optimizer)
    seed = 100 + fabric.global_rank
    random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
    progress = {"step": 1, "samples": 4, "tokens": 128}
    path = checkpoints.save(fabric, folder, model, optimizer, progress, {"model": {}, "data": {}})
    saved, drawn = digest(model), draw()
    step(model, optimizer)
    ahead = digest(model)

    model, optimizer = build(lr=1e-2, decay=0.3)
    restored = checkpoints.load(fabric, path, model, optimizer)
    loaded, redrawn = digest(model), draw()
    decays = [group["weight_decay"] for group in optimizer.param_groups]
    moments = [float(optimizer.state[p]["step"]) for p in model.parameters()]
    for group, decay in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        group["weight_decay"] = decay
    step(model, optimizer)
    answer = {
        "path": str(path),
        "progress": restored,
        "weights equal": saved == loaded,
        "one step on equal": ahead == digest(model) and ahead != saved,
        "drawn": drawn,
        "redrawn": redrawn,
        "decays": decays,
        "step counters": set(moments),
    }
    fabric.barrier()
    dist.destroy_process_group()
    return answer


def imported(mesh_shape: tuple[int, int], folder: str, tokens: torch.Tensor) -> dict | None:
    """Published weights in a sharded model: rank 0's whole logits, and gradients of the mean loss."""
    dist.init_process_group("gloo")
    weights = open_weights(folder)
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("data_parallel", "tensor_parallel"))
    with torch.device("meta"):
        model = Llama(weights.config)
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    load_weights(model, weights, write_shard)
    with torch.no_grad():
        logits = plain(model(tokens[:, :-1]))
    axis = mesh["data_parallel"]
    share = len(tokens) // axis.size()
    mine = tokens[axis.get_local_rank() * share :][:share]
    sharded = model(mine[:, :-1])
    with loss_parallel():
        loss = fabric_train.token_losses(sharded, mine[:, 1:]).sum() / tokens[:, 1:].numel()
        loss.backward()
    gradients = {name: plain(p.grad).numpy() for name, p in model.named_parameters()}
    answer = {"logits": logits.numpy(), "gradients": gradients} if dist.get_rank() == 0 else None
    dist.barrier()
    dist.destroy_process_group()
    return answer


def peak_mib() -> float:
    """Most memory that this process has held since the last call, file pages included; starts anew at the call."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # what earlier tests freed goes back, so that its reuse does not hide a peak
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return int(status.split("VmHWM:")[1].split()[0]) / 1024


def memory_of_import_and_export(folder: str, work: str) -> dict:
    """MiB above the start: an import's peak and shard on mesh (2, 2); on rank 0 an export's peak, in 50 MB files."""
    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data_parallel", "tensor_parallel"))
    peak_mib()
    start = peak_mib()
    weights = open_weights(folder)
    with torch.device("meta"):
        model = Llama(weights.config)
    parallelize(model, mesh)
    model.to_empty(device="cpu")
    load_weights(model, weights, write_shard)
    peak = peak_mib() - start
    shard = sum(p.to_local().numel() * 4 for p in model.parameters()) / 2**20
    partial, final = Path(work) / ".partial", Path(work) / "checkpoint"
    dcp.save({"model": model.state_dict()}, checkpoint_id=partial)
    dist.barrier()
    answer = {"peak": peak, "shard": shard}
    if dist.get_rank() == 0:
        torch.save({}, partial / "meta.pt")
        described = {"step": 1, "samples": 1, "tokens": 1, "model": weights.config.to_dict(), "data": {}}
        checkpoints.publish(partial, final, described)
    del model
    if dist.get_rank() == 0:
        peak_mib()
        start = peak_mib()
        to_hf(final, Path(work) / "exported", max_shard_bytes=50 * 10**6)
        answer["export"] = peak_mib() - start
    dist.barrier()
    dist.destroy_process_group()
    return answer


def within_documents(
    mesh_shape: tuple[int, int], recompute: str, tokens: torch.Tensor, documents: torch.Tensor
) -> dict:
    """A sharded model whose attention stays inside documents: rank 0's logits, and gradients of the summed loss."""
    dist.init_process_group("gloo")
    model, mesh = sharded_model(mesh_shape, tied=False, recompute=recompute, compile=False)
    axis = mesh["data_parallel"]
    share = len(tokens) // axis.size()
    mine = slice(axis.get_local_rank() * share, (axis.get_local_rank() + 1) * share)
    logits = model(tokens[mine, :-1], documents=documents[mine])
    with loss_parallel():
        fabric_train.token_losses(logits, tokens[mine, 1:]).sum().backward()
    gradients = {name: plain(p.grad).numpy() for name, p in model.named_parameters()}
    answer = {"logits": plain(logits.detach()).numpy(), "gradients": gradients}
    dist.barrier()
    dist.destroy_process_group()
    return answer


def fork_and_train(arguments: list[str], die_at: str | None = None) -> int:
    """The real program in a forked child of this process; what became of it: its exit code, or minus a signal.

    ``die_at`` names a point of a save, at the second save, at which the child is killed by SIGKILL.
    """
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        return os.waitstatus_to_exitcode(status)
    try:
        if die_at is not None:
            _die(die_at)
        fabric_train.main(arguments)
        os._exit(0)
    except SystemExit as end:
        os._exit(end.code or 0)
    except BaseException:
        traceback.print_exc()
        os._exit(99)


def _die(point: str) -> None:
    """Arrange for this process to be killed at a point of its second save."""
    from lightning.fabric import Fabric

    saves = 0
    real_save = checkpoints.save

    def save(*args, **kwargs):
        nonlocal saves
        saves += 1
        if saves == 2:
            _arm(point)
        return real_save(*args, **kwargs)

    def kill(*args, **kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    def half(real):
        """Write half of what was to be written, then die."""

        def torch_save(content, file, *args, **kwargs):
            held = io.BytesIO()
            real(content, held, *args, **kwargs)
            written = held.getvalue()[: held.tell() // 2]
            if hasattr(file, "write"):
                file.write(written)
                file.flush()
            else:
                Path(file).write_bytes(written)
            kill()

        return torch_save

    def _arm(point: str) -> None:
        folders = checkpoints.folders
        if point == "before the first byte":
            Fabric.save = kill
        elif point == "in a shard":
            filesystem = sys.modules["torch.distributed.checkpoint.filesystem"]
            filesystem.torch = types.SimpleNamespace(**{**vars(torch), "save": half(torch.save)})
        elif point in ("before .metadata", "after .metadata"):
            writer = dcp.FileSystemWriter
            real_finish = writer.finish

            def finish(self, *args, **kwargs):
                if point == "after .metadata":
                    real_finish(self, *args, **kwargs)
                kill()

            writer.finish = finish
        elif point == "in meta.pt":
            strategy = sys.modules["lightning.fabric.strategies.model_parallel"]
            strategy.torch = types.SimpleNamespace(**{**vars(torch), "save": half(torch.save)})
        elif point == "before the manifest":
            folders.write_manifest = kill
        elif point in ("before the rename", "after the rename"):
            real_rename = Path.rename

            def rename(self, target):
                if not self.name.endswith(".partial"):  # torch.distributed.checkpoint renames too
                    return real_rename(self, target)
                if point == "after the rename":
                    real_rename(self, target)
                return kill()

            Path.rename = rename
        elif point == "in retention":
            folders.shutil = types.SimpleNamespace(rmtree=kill)
        else:
            raise AssertionError(point)

    checkpoints.save = save


def digest_of(checkpoint: str) -> dict[str, str]:
    """sha256 of every tensor in a checkpoint, weights and both moments, and its progress; read without a mesh."""
    one = Path(checkpoint) / "checkpoint.pt"
    if one.is_file():
        content = torch.load(one, weights_only=True)
        state = {f"model.{name}": tensor for name, tensor in content["model"].items()}
        for name, moments in content["optimizer"]["state"].items():
            state |= {f"optimizer.state.{name}.{kind}": tensor for kind, tensor in moments.items()}
        found = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}
        return found | {key: str(content["progress"][key]) for key in ("step", "samples", "tokens")}
    reader = dcp.FileSystemReader(checkpoint)
    stored = reader.read_metadata().state_dict_metadata
    state = {
        key: torch.empty(tuple(entry.size), dtype=entry.properties.dtype)
        for key, entry in stored.items()
        if hasattr(entry, "size")
    }
    dcp.load(state, storage_reader=reader, no_dist=True)
    found = {key: hashlib.sha256(value.numpy().tobytes()).hexdigest() for key, value in state.items()}
    progress = torch.load(Path(checkpoint) / "meta.pt", weights_only=True)["progress"]
    return found | {key: str(progress[key]) for key in ("step", "samples", "tokens")}


def bad_gradients(arguments: list[str], rank: int, steps: list[int]) -> dict:
    """A run in which one rank's loss is not a number at some steps; digests of weights and moments after each step."""
    found, calls = [], 0
    real_losses = fabric_train.token_losses

    def losses(logits, labels):
        nonlocal calls
        calls += torch.is_grad_enabled()
        value = real_losses(logits, labels)
        return value * torch.nan if calls in steps and int(os.environ["RANK"]) == rank else value

    def step(self, *args, **kwargs):
        result = real_step(self, *args, **kwargs)
        inner = [t for group in self.param_groups for p in group["params"] for t in (p, *self.state[p].values())]
        digest = hashlib.sha256()
        for tensor in inner:
            digest.update(getattr(tensor.detach(), "to_local", tensor.detach)().numpy().tobytes())
        found.append(digest.hexdigest())
        return result

    real_step = torch.optim.AdamW.step
    fabric_train.token_losses, torch.optim.AdamW.step = losses, step
    heard = io.StringIO()
    code = 0
    real_sleep, fabric_train.time.sleep = fabric_train.time.sleep, lambda seconds: None
    try:
        with contextlib.redirect_stdout(heard), contextlib.redirect_stderr(heard):
            fabric_train.main(arguments)
    except SystemExit as end:
        code = end.code
    finally:
        fabric_train.token_losses, torch.optim.AdamW.step = real_losses, real_step
        fabric_train.time.sleep = real_sleep
        if dist.is_initialized():
            dist.destroy_process_group()
    return {"digests": found, "said": heard.getvalue(), "code": code}


def saves_that_fail(folder: str) -> dict:
    """Saves on 4 ranks that fail: at one rank's shard, at rank 0's meta.pt, for what is not plain or not finite."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def cut(model, mesh):
        parallelize(model, mesh)
        model.to_empty(device="cpu")
        init_weights(model, 0, write_shard)
        return model

    fabric = Fabric(accelerator="cpu", devices=4, strategy=ModelParallelStrategy(cut, 2, 2))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = Llama(small_config(tied=False))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(fabric_train.make_optimizer(model, fabric_train.OptimizerOptions()))
    progress = {"step": 0, "samples": 0, "tokens": 0}
    described = {"model": {}, "data": {}}
    answer: dict = {}

    def attempt(name: str, progress: dict = progress) -> None:
        try:
            answer[name] = str(checkpoints.save(fabric, folder, model, optimizer, progress, described))
        except (OSError, TypeError, FloatingPointError) as error:
            answer[name] = f"{type(error).__name__}: {error}"
        answer[f"files after {name}"] = sorted(path.name for path in Path(folder).glob("*"))
        fabric.barrier()

    attempt("step 0")
    answer["moments after step 0"] = len(optimizer.state)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    if fabric.global_rank == 2:  # its disk is full
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limit[1]))
    attempt("full on rank 2", {**progress, "step": 1})
    resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    strategy = sys.modules["lightning.fabric.strategies.model_parallel"]
    if fabric.global_rank == 0:

        def full(*args, **kwargs):
            raise OSError(28, "No space left on device")

        strategy.torch = types.SimpleNamespace(**{**vars(torch), "save": full})
    attempt("full for meta.pt", {**progress, "step": 1})
    strategy.torch = torch
    attempt("not plain", {**progress, "step": 1, "loss": np.float64(1.0)})
    attempt("freed", {**progress, "step": 1})
    weight = model.get_parameter("norm.weight")
    with torch.no_grad():
        if fabric.global_rank == 3:
            weight.to_local()[0] = torch.inf
    attempt("not finite", {**progress, "step": 2})
    fabric.barrier()
    dist.destroy_process_group()
    return answer


def loaded_and_saved(mesh_shape: tuple[int, int], path: str, folder: str) -> None:
    """Load a checkpoint on a mesh and save it again, in shards, without a step in between."""
    from lightning.fabric import Fabric
    from lightning.fabric.strategies import ModelParallelStrategy

    def cut(model, mesh):
        parallelize(model, mesh)
        model.to_empty(device="cpu")
        init_weights(model, 99, write_shard)
        return model

    data, tensor = mesh_shape
    fabric = Fabric(accelerator="cpu", devices=data * tensor, strategy=ModelParallelStrategy(cut, data, tensor))
    fabric.launch()
    with fabric.init_module(empty_init=True):
        model = Llama(LlamaConfig.from_dict(checkpoints.read_manifest(path)["model"]))
    model = fabric.setup(model)
    optimizer = fabric.setup_optimizers(fabric_train.make_optimizer(model, fabric_train.OptimizerOptions()))
    progress = checkpoints.load(fabric, path, model, optimizer)
    checkpoints.save(fabric, folder, model, optimizer, progress, {"model": {}, "data": {}})
    fabric.barrier()
    dist.destroy_process_group()
