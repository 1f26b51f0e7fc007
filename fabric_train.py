"""Train a Llama on any mesh with Lightning Fabric: the options, the loop, validation, and the program around them.

fabric run fabric_train.py --devices 4        # four processes, CPU or GPU
python fabric_train.py                        # one process, what a debugger steps through
torchrun --nproc-per-node 4 fabric_train.py
"""

import csv
import difflib
import hashlib
import json
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from jsonargparse import ArgumentError, ArgumentParser, Namespace, set_parsing_settings
from torch import Tensor
from torch.distributed.tensor.parallel import loss_parallel
from torch.utils.data import DataLoader

import checkpoints
from data import (
    IGNORED,
    Era,
    HeldOut,
    Mixture,
    RandomTokens,
    RankBatches,
    Shuffled,
    TokenDataset,
    default_folder,
    fingerprint,
    prepare_default,
)
from llama import PRESETS, Llama, LlamaConfig, Weights, init_weights, load_weights, open_weights
from llama.generate import HostCopy, sample_ids
from parallel import Layout, check_precision, choose_layout, parallelize, plain, write_shard

if TYPE_CHECKING:
    from lightning.fabric import Fabric

    from checkpoints.convert import CheckpointWeights

METRICS = (
    "step", "tokens", "loss", "grad_norm", "lr", "seconds", "tokens_per_second",
    "data_wait", "mfu", "memory_gib", "validation_loss", "validation_bits_per_byte",
)  # fmt: skip
# Dense bf16 matrix FLOP/s by the name that torch gives the device. Sources: NVIDIA's data sheets of each chip.
PEAK_FLOPS = {
    "NVIDIA H200": 989.4e12,
    "NVIDIA H100 80GB HBM3": 989.4e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
}


@dataclass(frozen=True)
class DataOptions:
    """Data: which text, and how it is cut into batches"""

    path: str | None = None
    """token folder, several with weights as a=0.7,b=0.3, or `random` (default: the Python standard library's source)"""
    sequence_length: int = 128
    """tokens a sequence"""
    global_batch_size: int = 64
    """sequences an optimizer step, over the whole mesh"""
    micro_batch_size: int | None = None
    """sequences a device runs at once; gradient accumulation follows (default: its whole share)"""
    mask_documents: bool = False
    """attention stays inside a document, and positions start anew in each"""
    change_from: int | None = None
    """on resume: global sample from which other data, weights, length or seed hold (default: they must be the same)"""
    workers: int = 0
    """loader worker processes of each rank"""


@dataclass(frozen=True)
class OptimizerOptions:
    """Optimizer: AdamW, its schedule, and clipping"""

    lr: float = 8e-3
    """peak learning rate"""
    min_lr: float = 0.0
    """learning rate at the end of the schedule"""
    warmup_steps: int | None = None
    """steps of linear warm-up (default: a tenth of the schedule, at most 200)"""
    schedule: Literal["cosine", "linear", "wsd", "constant"] = "cosine"
    """shape after warm-up"""
    decay_steps: int | None = None
    """step at which min_lr is reached (default: --steps)"""
    weight_decay: float = 0.1
    """decoupled weight decay of matrices; norm weights have none"""
    beta1: float = 0.9
    """decay of the first moment"""
    beta2: float = 0.95
    """decay of the second moment"""
    eps: float = 1e-8
    """added to the root of the second moment"""
    clip_norm: float = 1.0
    """largest global gradient norm; 0: no clipping"""
    max_skipped: int = 20
    """steps in a row whose gradient is not finite, each of which changes nothing, before the run ends; 0: no limit"""


@dataclass(frozen=True)
class ParallelOptions:
    """Parallel: how the devices are used"""

    data: int | Literal["auto", "node"] = "auto"
    """data-parallel size; auto: what tensor leaves; node: the number of nodes"""
    tensor: int | Literal["auto", "node"] = "auto"
    """tensor-parallel size; auto: 2 where a node's device count is even, else 1; node: the devices of a node"""
    recompute: Literal["none", "selective", "full"] = "none"
    """activation checkpointing of each block"""
    compile: bool = False
    """torch.compile each block"""
    timeout_seconds: int = 1800
    """collective time-out"""


@dataclass(frozen=True)
class CheckpointOptions:
    """Checkpoints: how often, and how many to keep"""

    every: int = 40
    """steps between saves; the last step is always saved; 0: only the last"""
    keep_last: int = 2
    """how many of the newest to keep; -1: all"""
    keep_every: int = 0
    """multiples of this step are kept for good; 0: none"""
    distributed: bool = True
    """shards of every rank; false: one file from rank 0, for plain torch.load; any mesh resumes from either"""
    on_error: Literal["stop", "warn"] = "stop"
    """at a save that fails, such as on a full disk: stop, or say so and train on"""


@dataclass(frozen=True)
class ValidateOptions:
    """Validate: loss and bits per byte on held-out text"""

    every: int = 40
    """steps between validations; 0: never"""
    sequences: int = 64
    """held-out sequences, spread evenly over the held-out text, the same ones each time"""


@dataclass(frozen=True)
class LogOptions:
    """Log: what is shown"""

    every: int = 10
    """steps a line in the terminal and a row in metrics.csv"""
    samples_every: int = 0
    """steps between text samples; 0: one at the end; -1: none"""


@dataclass(frozen=True)
class Options:
    """Run"""

    model: str | None = None
    """preset, or a folder with a Hugging Face config.json (default: that of --init_from or of the run, else tiny)"""
    init_from: str | None = None
    """weights to start from: a folder in Hugging Face's or Meta's layout, or a checkpoint (default: seeded random)"""
    steps: int = 100
    """optimizer steps to reach"""
    seed: int = 11
    """seed of the weights and of the data order"""
    out: str = "runs/tiny"
    """run folder"""
    resume: str = "auto"
    """auto: newest good checkpoint of --out, else a fresh start; never: error if --out is in use; or a checkpoint"""
    max_minutes: float | None = None
    """stop, saved, before this much wall-clock time has gone (default: no limit)"""
    data: DataOptions = field(default_factory=DataOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    checkpoints: CheckpointOptions = field(default_factory=CheckpointOptions)
    validate: ValidateOptions = field(default_factory=ValidateOptions)
    log: LogOptions = field(default_factory=LogOptions)


def train(
    fabric: "Fabric",
    model: Llama,
    optimizer: torch.optim.Optimizer,
    training: Shuffled,
    held_out: HeldOut | None,
    layout: Layout,
    options: Options,
    state: "RunState",
    stopping: "Stopping",
) -> None:
    """The loop. Every rank runs it; `state.progress` is moved on.

    `training` is indexed by global sample and gives (inputs, labels, source), the first two (S,) int64.
    """
    data_axis, progress = fabric.strategy.device_mesh["data_parallel"], state.progress
    micro_batches = load(fabric, training, progress["samples"], layout, options)
    by_source = torch.zeros(len(training.names), 2, dtype=torch.float64, device=fabric.device)  # nats, tokens
    clock, skipped = Clock(progress["step"]), Skipped(options.optimizer.max_skipped)

    for step in range(progress["step"] + 1, options.steps + 1):
        with clock.waiting():
            batch = [next(micro_batches) for _ in range(layout.accumulation)]  # (inputs, labels (B, S), sources (B,))

        # The loss is the mean over the valid tokens of the whole step: a sum over micro-batches and the data axis.
        valid_tokens = sum((labels != IGNORED).sum() for _, labels, _ in batch)
        counts = torch.stack((valid_tokens, torch.tensor(int(stopping.asked(clock)), device=fabric.device)))
        counts = fabric.all_reduce(counts, reduce_op="sum")  # over all ranks: a tensor-parallel group counts t times
        valid_tokens, asked = (counts[0] // layout.tensor).clamp(min=1), HostCopy(counts[1])
        step_loss = torch.zeros((), device=fabric.device)
        for i, (inputs, labels, sources) in enumerate(batch):
            last = i == len(batch) - 1
            with fabric.no_backward_sync(model, enabled=not last):
                logits = model(inputs, documents=training.documents(inputs))  # (B, S, V); on tp a DTensor, cut over V
                with loss_parallel():  # works for plain logits too; backward belongs inside
                    losses = token_losses(logits, labels)  # (B, S)
                    fabric.backward(losses.sum() / valid_tokens)
            nats = plain(losses.detach()).sum(1)
            by_source.index_add_(0, sources, torch.stack((nats, (labels != IGNORED).sum(1)), 1).double())
            step_loss += nats.sum() / valid_tokens

        lr = set_learning_rate(optimizer, learning_rate(step, options.optimizer, options.steps))
        max_norm = options.optimizer.clip_norm or math.inf
        grad_norm = plain(fabric.clip_gradients(model, optimizer, max_norm=max_norm, error_if_nonfinite=False))
        # 1 on the device where the norm is not finite: then the step changes neither weights nor moments
        optimizer.optimizer.found_inf = skipped.note(step, progress["samples"], grad_norm)
        optimizer.step()
        optimizer.zero_grad()
        state.advance(options)

        ending = step == options.steps or asked.wait() > 0  # all ranks see the same; the reduction is long done
        validating = options.validate.every > 0 and held_out and due(step, options.validate.every, options.steps)
        if step == 1 or validating or ending or due(step, options.log.every, options.steps):
            totals = torch.cat((step_loss.double()[None], by_source.flatten()))
            totals = fabric.all_reduce(totals, group=data_axis.get_group(), reduce_op="sum")
            step_loss, *totals = totals.tolist()  # host sync
            metrics = {"loss": step_loss, "grad_norm": grad_norm.item(), "lr": lr}
            metrics |= loss_by_source(training.names, totals) | speed(fabric, model.config, options, clock, step)
            by_source.zero_()
            if validating:
                metrics |= validate(fabric, model, held_out, training, layout, options.validate.sequences)
            report(fabric, options, {**progress, **metrics})
            skipped.report(fabric, options)
            clock.restart(step)  # what follows the line does not count as training time

        if ending or due(step, options.checkpoints.every, options.steps):
            save_checkpoint(fabric, model, optimizer, options, state, stopping)
            clock.restart(step)
        if held_out and options.log.samples_every >= 0 and due(step, options.log.samples_every, options.steps):
            write_sample(fabric, model, held_out, layout, options, step)
            clock.restart(step)
        if ending:
            return


@dataclass
class RunState:
    """What a checkpoint says beside weights and moments, and the files that travel with it"""

    progress: dict[str, int]  # step, samples and tokens done
    described: dict[str, Any]  # for its manifest: model, data, mesh, options
    assets: dict[str, bytes]  # file name -> content; on rank 0

    def advance(self, options: Options) -> None:
        """Count one step."""
        self.progress["step"] += 1
        self.progress["samples"] += options.data.global_batch_size
        self.progress["tokens"] += options.data.global_batch_size * options.data.sequence_length


class Stopping:
    """Whether the run is to end before its last step: a signal to any of its processes, or the time that it was given.

    The first SIGTERM, SIGINT or SIGUSR1 only sets a flag, which the ranks share at their next step; a second one
    leaves at once.
    """

    SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)

    def __init__(self, max_minutes: float | None) -> None:
        self.began = time.monotonic() - process_age()
        self.limit = math.inf if max_minutes is None else 60 * max_minutes
        self.save_seconds = 0.0  # the longest save so far
        self.reason: str | None = None
        self.earlier = {number: signal.signal(number, self._handle) for number in self.SIGNALS}

    def _handle(self, number: int, frame: object) -> None:
        if self.reason is not None:
            os._exit(128 + number)
        self.reason = signal.Signals(number).name
        if int(os.environ.get("RANK", 0)) == 0:
            os.write(2, f"{self.reason}: saving after this step and leaving; again to leave at once\n".encode())

    def asked(self, clock: "Clock") -> bool:
        """Whether this process is to stop: so early that two more steps, a save and the end of the program fit."""
        left = self.limit - (time.monotonic() - self.began)
        if self.reason is None and left < self.save_seconds + 2 * clock.longest_step + 5:
            self.reason = "--max_minutes"
        return self.reason is not None

    @contextmanager
    def saving(self) -> Iterator[None]:
        """What runs inside is a save, whose time counts."""
        before = time.monotonic()
        yield
        self.save_seconds = max(self.save_seconds, time.monotonic() - before)

    def restore(self) -> None:
        """Let the signals do what they did before."""
        for number, handler in self.earlier.items():
            signal.signal(number, handler)


def process_age() -> float:
    """Seconds since this process was started, its imports included; 0 where that cannot be told."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, IndexError, ValueError):
        return 0.0


class Skipped:
    """Steps whose gradient is not finite: found on the device, without a wait for it, and told at the next line."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.noted: list[tuple[int, int, Tensor]] = []  # step, its first sample, 1 where it was skipped
        self.in_a_row = 0

    def note(self, step: int, sample: int, grad_norm: Tensor) -> Tensor:
        """1 on the device if the gradient's norm, equal on all ranks, is not finite, else 0."""
        bad = (~grad_norm.isfinite()).float()
        self.noted.append((step, sample, bad))
        return bad

    def report(self, fabric: "Fabric", options: Options) -> None:
        """Say which steps were skipped since the last time; called after a host sync.

        Raises:
            FloatingPointError: on all ranks, after too many in a row.
        """
        flags = torch.stack([bad for *_, bad in self.noted]).tolist()
        for (step, sample, _), bad in zip(self.noted, flags, strict=True):
            self.in_a_row = self.in_a_row + 1 if bad else 0
            if bad:
                last = sample + options.data.global_batch_size - 1
                fabric.print(f"step {step}: the gradient is not finite; skipped, samples {sample} to {last}")
            if self.limit and self.in_a_row >= self.limit:
                raise FloatingPointError(
                    f"the gradient was not finite in {self.in_a_row} steps in a row, up to step {step} "
                    "(--optimizer.max_skipped); the newest checkpoint is from before: lower --optimizer.lr, or look at "
                    "the samples above"
                )
        self.noted.clear()


class Clock:
    """Training time since a step, and how much of it the host waited for data; in seconds."""

    def __init__(self, step: int) -> None:
        self.longest_step = 0.0
        self.step, self.started = step, time.perf_counter()
        self.restart(step)

    def restart(self, step: int) -> None:
        """Count from now, after this step."""
        if step > self.step:
            self.longest_step = max(self.longest_step, (time.perf_counter() - self.started) / (step - self.step))
        self.step, self.started, self.waited = step, time.perf_counter(), 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """What runs inside is waiting for data."""
        before = time.perf_counter()
        yield
        self.waited += time.perf_counter() - before


def load(
    fabric: "Fabric", training: Shuffled, samples: int, layout: Layout, options: Options
) -> Iterator[list[Tensor]]:
    """Micro-batches from a global sample on, without an end, on this rank's device; copied from pinned memory while
    the device computes."""
    rank = fabric.strategy.device_mesh["data_parallel"].get_local_rank()
    loader = DataLoader(
        training,
        batch_sampler=RankBatches(samples, options.data.global_batch_size, layout.micro_batch, rank, layout.data),
        num_workers=options.data.workers,
        pin_memory=fabric.device.type == "cuda",
        worker_init_fn=leave_signals,
    )
    return iter(fabric.setup_dataloaders(loader, use_distributed_sampler=False))


def leave_signals(worker: int) -> None:
    """In a loader's worker: signals are the trainer's business; a worker ends when its trainer does."""
    for number in Stopping.SIGNALS:
        signal.signal(number, signal.SIG_IGN if number == signal.SIGINT else signal.SIG_DFL)


def loss_by_source(names: list[str], totals: list[float]) -> dict[str, float]:
    """Of each source: the mean loss in nats a token since the last line, and the tokens; nothing for a single source.

    Args:
        totals: nats and tokens of the first source, of the second, ...
    """
    if len(names) == 1:
        return {}
    metrics = {}
    for name, nats, tokens in zip(names, totals[::2], totals[1::2], strict=True):
        metrics[f"tokens_{name}"] = int(tokens)
        if tokens:
            metrics[f"loss_{name}"] = nats / tokens
    return metrics


def token_losses(logits: Tensor, labels: Tensor) -> Tensor:
    """Each token's cross-entropy in nats (B, S), in fp32; 0 where the label is IGNORED.

    Args:
        logits: (B, S, V), plain, or a DTensor sharded over V inside ``loss_parallel``.
        labels: (B, S) int64.
    """
    losses = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(0, 1), ignore_index=IGNORED, reduction="none")
    return losses.view(labels.shape)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> float:
    """Give every parameter group this rate, and return it."""
    for group in optimizer.param_groups:
        group["lr"] = lr
    return lr


def learning_rate(step: int, options: OptimizerOptions, steps: int) -> float:
    """The learning rate of optimizer step `step`, counted from 1: a pure function, there is no scheduler to save.

    With D = decay_steps (or --steps), W = warmup_steps (or a tenth of D, at most 200), p = (step - W) / (D - W):

    =================  ===========================================================
    step <= W          lr * step / W
    step >= D          min_lr (`constant`: lr)
    cosine             min_lr + (lr - min_lr) * (1 + cos(pi p)) / 2
    linear             min_lr + (lr - min_lr) * (1 - p)
    wsd                lr up to p = 0.8, then linear to min_lr at p = 1
    constant           lr
    =================  ===========================================================

    Sources: cosine arXiv 1608.03983, wsd (warm-up, stable, decay) arXiv 2404.06395.
    """
    lr, min_lr = options.lr, options.min_lr
    end = steps if options.decay_steps is None else options.decay_steps
    warmup = min(end // 10, 200) if options.warmup_steps is None else options.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    if options.schedule == "constant":
        return lr
    if step >= end:
        return min_lr
    p = (step - warmup) / (end - warmup)
    if options.schedule == "cosine":
        return min_lr + (lr - min_lr) * (1 + math.cos(math.pi * p)) / 2
    remaining = 1 - p if options.schedule == "linear" else min(1.0, (1 - p) / 0.2)
    return min_lr + (lr - min_lr) * remaining


@torch.no_grad()
def validate(
    fabric: "Fabric", model: Llama, held_out: HeldOut, training: Shuffled, layout: Layout, sequences: int
) -> dict[str, float]:
    """Mean loss in nats a token, and bits a byte of text, over `sequences` windows spread over the held-out text.

    Every mesh sums over the same windows: a last batch that they do not fill is filled up with ignored labels.
    """
    data_axis = fabric.strategy.device_mesh["data_parallel"]
    rank, micro = data_axis.get_local_rank(), layout.micro_batch
    sequences = min(sequences, len(held_out))
    total = torch.zeros(2, dtype=torch.float64, device=fabric.device)  # nats, tokens
    for start in range(0, sequences, micro * layout.data):
        mine = range(start + rank * micro, start + (rank + 1) * micro)
        rows = [held_out[min(i, sequences - 1) * len(held_out) // sequences] for i in mine]
        inputs, labels = (torch.stack(column) for column in zip(*rows, strict=True))
        labels[max(0, sequences - mine.start) :] = IGNORED
        inputs, labels = inputs.to(fabric.device), labels.to(fabric.device)
        with loss_parallel():
            losses = token_losses(model(inputs, documents=training.documents(inputs)), labels)
        total[0] += plain(losses).double().sum()
        total[1] += (labels != IGNORED).sum()
    nats, tokens = fabric.all_reduce(total, group=data_axis.get_group(), reduce_op="sum").tolist()
    metrics = {"validation_loss": nats / tokens}
    if held_out.bytes_per_token is not None:
        metrics["validation_bits_per_byte"] = nats / tokens / math.log(2) / held_out.bytes_per_token
    return metrics


def due(step: int, every: int, last: int) -> bool:
    """Whether something done every `every` steps (0: only at the end) is due at `step`."""
    return step == last or (every > 0 and step % every == 0)


def speed(fabric: "Fabric", config: LlamaConfig, options: Options, clock: Clock, step: int) -> dict[str, float]:
    """Seconds a step, tokens a second over the whole mesh, the share of the time that was waiting for data, and where
    known MFU and the peak memory of this device.

    MFU counts ``LlamaConfig.flops_per_token`` against the dense bf16 peak in ``PEAK_FLOPS``.
    """
    steps = step - clock.step
    if not steps:
        return {}
    seconds = time.perf_counter() - clock.started
    tokens_per_second = steps * options.data.global_batch_size * options.data.sequence_length / seconds
    metrics = {"seconds": seconds / steps, "tokens_per_second": tokens_per_second, "data_wait": clock.waited / seconds}
    if fabric.device.type == "cuda":
        metrics["memory_gib"] = torch.cuda.max_memory_allocated() / 2**30
        peak = PEAK_FLOPS.get(torch.cuda.get_device_name())
        if peak:
            flops = tokens_per_second * config.flops_per_token(options.data.sequence_length)
            metrics["mfu"] = flops / (peak * fabric.world_size)
    return metrics


def report(fabric: "Fabric", options: Options, metrics: dict[str, float]) -> None:
    """One line in the terminal and one row in metrics.csv, by rank 0."""
    if not fabric.is_global_zero:
        return
    with (Path(options.out) / "metrics.csv").open("r+", newline="") as file:
        columns = next(csv.reader(file))
        file.seek(0, os.SEEK_END)
        csv.DictWriter(file, columns, extrasaction="ignore").writerow(metrics)
    step = int(metrics["step"])
    line = f"step {step:>{len(str(options.steps))}}/{options.steps}"
    if "loss" in metrics:
        line += f"  loss {metrics['loss']:.4f}  grad norm {metrics['grad_norm']:.3f}  lr {metrics['lr']:.2e}"
    by_source = {key.removeprefix("loss_"): value for key, value in metrics.items() if key.startswith("loss_")}
    line += f"  ({', '.join(f'{name} {loss:.4f}' for name, loss in by_source.items())})" if by_source else ""
    if "seconds" in metrics:
        eta = timedelta(seconds=round((options.steps - step) * metrics["seconds"]))
        line += f"  {metrics['tokens_per_second']:,.0f} tokens/s"
        line += f"  MFU {metrics['mfu']:.1%}" if "mfu" in metrics else ""
        line += f"  {metrics['memory_gib']:.1f} GiB" if "memory_gib" in metrics else ""
        line += f"  data wait {metrics['data_wait']:.1%}  ETA {eta}"
    if "validation_loss" in metrics:
        line += f"  | held out: {metrics['validation_loss']:.4f} nats a token"
    if "validation_bits_per_byte" in metrics:
        line += f", {metrics['validation_bits_per_byte']:.3f} bits a byte"
    print(line, flush=True)


@torch.no_grad()
def write_sample(
    fabric: "Fabric", model: Llama, held_out: HeldOut, layout: Layout, options: Options, step: int
) -> None:
    """Let the live sharded model go on from a held-out beginning; all ranks run it, rank 0 appends it to samples.md."""
    tokenizer = held_out.tokenizer
    if tokenizer is None:  # ids that were adopted without it
        return
    prompt = held_out[len(held_out) // 2][0][:32].tolist()
    context = min(options.data.sequence_length, 128 * layout.tensor)  # a multiple of the tensor-parallel size
    with torch.compiler.set_stance("force_eager"):  # another shape than training's: not worth compiling for
        ids = sample_ids(
            lambda tokens: plain(model(tokens)),
            prompt,
            new_tokens=96,
            context=context,
            vocab_size=tokenizer.vocab_size,
            device=fabric.device,
        )
    if fabric.is_global_zero:
        beginning, text = (
            "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in tokenizer.decode(part))
            for part in (prompt, ids)
        )
        with (Path(options.out) / "samples.md").open("a", encoding="utf-8") as file:
            file.write(f"## Step {step}\n\n```text\n{beginning}|{text}\n```\n\n")
        if step == options.steps:
            print(f"\nThe model goes on from {beginning!r}:\n\n{beginning}{text}\n", flush=True)


def save_checkpoint(
    fabric: "Fabric",
    model: Llama,
    optimizer: torch.optim.Optimizer,
    options: Options,
    state: RunState,
    stopping: Stopping,
) -> None:
    """Publish a checkpoint of this step, then retire old ones.

    Raises:
        OSError: it could not be written, on all ranks, unless that is only to be said (--checkpoints.on_error).
    """
    folder = Path(options.out) / "checkpoints"
    try:
        with stopping.saving():
            distributed = options.checkpoints.distributed
            checkpoints.save(
                fabric, folder, model, optimizer, state.progress, state.described, state.assets, distributed
            )
    except OSError as error:
        if options.checkpoints.on_error == "stop":
            raise
        fabric.print(f"warning: {error}; training goes on (--checkpoints.on_error warn)", flush=True)
        return
    if fabric.is_global_zero:
        checkpoints.retire(folder, options.checkpoints.keep_last, options.checkpoints.keep_every)


def plot_loss(metrics_file: Path, picture: Path) -> None:
    """Draw the losses of metrics.csv over steps."""
    import matplotlib

    matplotlib.use("Agg")  # no screen needed
    from matplotlib import pyplot

    with metrics_file.open(newline="") as file:
        rows = list(csv.DictReader(file))
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for column, label, style in (("loss", "training", "-"), ("validation_loss", "held out", "o-")):
        points = [(int(row["step"]), float(row[column])) for row in rows if row[column]]
        if points:
            axes.plot(*zip(*points, strict=True), style, label=label)
    axes.set(xlabel="optimizer step", ylabel="loss (nats a token)")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)
    pyplot.close(figure)


def begin_metrics(path: Path, step: int, sources: list[str]) -> None:
    """Make metrics.csv ready for rows after `step`: a header, and of an earlier run only the rows up to that step.

    With several sources there are columns for the loss and the tokens of each.
    """
    rows = rows_up_to(path, step) if step else []
    columns = [*METRICS, *(key for row in rows[:1] for key in row if key not in METRICS)]
    if len(sources) > 1:
        columns += [key for name in sources for key in (f"loss_{name}", f"tokens_{name}") if key not in columns]
    fresh = path.with_name(".metrics.csv.partial")
    with fresh.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(rows)
    fresh.replace(path)


def rows_up_to(path: Path, step: int) -> list[dict[str, str]]:
    """The rows of a metrics.csv up to a step; none where there is no such file.

    Raises:
        ValueError: it is another kind of file.
    """
    if not path.exists():
        return []
    try:
        with path.open(newline="") as file:
            return [row for row in csv.DictReader(file) if row["step"] and int(row["step"]) <= step]
    except (KeyError, ValueError, OSError) as error:
        raise ValueError(
            f"{path} is not the metrics of a run ({error!r}); move it away or choose another --out"
        ) from None


def make_optimizer(model: Llama, options: OptimizerOptions) -> torch.optim.AdamW:
    """Fused AdamW (arXiv 1711.05101); weight decay for matrices only, not for the norms' vectors."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [
        {"params": matrices, "weight_decay": options.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    # fused: no temporaries of the size of the parameters, unlike foreach
    return torch.optim.AdamW(groups, lr=options.lr, betas=(options.beta1, options.beta2), eps=options.eps, fused=True)


def check_options(options: Options) -> None:
    """Refuse numbers that cannot be meant; what depends on the model or the devices is checked in parallel/layout.py.

    Raises:
        ValueError: with the option, its value and what it takes.
    """
    at_least = {
        "steps": (options.steps, 1),
        "data.sequence_length": (options.data.sequence_length, 1),
        "data.workers": (options.data.workers, 0),
        "data.change_from": (0 if options.data.change_from is None else options.data.change_from, 0),
        "optimizer.warmup_steps": (options.optimizer.warmup_steps or 0, 0),
        "optimizer.clip_norm": (options.optimizer.clip_norm, 0),
        "optimizer.max_skipped": (options.optimizer.max_skipped, 0),
        "max_minutes": (1.0 if options.max_minutes is None else options.max_minutes, 0),
        "optimizer.lr": (options.optimizer.lr, 0),
        "optimizer.min_lr": (options.optimizer.min_lr, 0),
        "optimizer.weight_decay": (options.optimizer.weight_decay, 0),
        "optimizer.decay_steps": (1 if options.optimizer.decay_steps is None else options.optimizer.decay_steps, 1),
        "optimizer.eps": (options.optimizer.eps, 1e-45),  # the smallest fp32 above 0
        "parallel.timeout_seconds": (options.parallel.timeout_seconds, 1),
        "checkpoints.every": (options.checkpoints.every, 0),
        "checkpoints.keep_last": (options.checkpoints.keep_last, -1),
        "checkpoints.keep_every": (options.checkpoints.keep_every, 0),
        "validate.every": (options.validate.every, 0),
        "validate.sequences": (options.validate.sequences, 1),
        "log.every": (options.log.every, 1),
        "log.samples_every": (options.log.samples_every, -1),
    }
    for option, (value, least) in at_least.items():
        if not value >= least:  # also refuses NaN
            raise ValueError(f"--{option} is {value}; it takes a number of at least {least}")
    for option, beta in (("beta1", options.optimizer.beta1), ("beta2", options.optimizer.beta2)):
        if not 0 <= beta < 1:
            raise ValueError(f"--optimizer.{option} is {beta}; it takes a number from 0 up to, but not including, 1")
    if not 0 <= options.seed < 2**63:
        raise ValueError(f"--seed is {options.seed}; it takes a number from 0 to 2^63 - 1")
    if options.parallel.timeout_seconds > 10**7:
        raise ValueError(f"--parallel.timeout_seconds is {options.parallel.timeout_seconds}; it takes at most 10^7")
    if not options.out:
        raise ValueError("--out is empty; it takes the name of a folder")
    for option, place in (("out", options.out), ("resume", options.resume), ("init_from", options.init_from or "")):
        if "://" in place:
            raise ValueError(f"--{option} {place}: remote folders are not supported; mount it, and give its local path")
    if options.checkpoints.keep_last == 0:
        raise ValueError("--checkpoints.keep_last is 0, which would delete every checkpoint; it takes 1 or more, or -1")
    decay = options.steps if options.optimizer.decay_steps is None else options.optimizer.decay_steps
    if options.optimizer.schedule != "constant" and decay < (options.optimizer.warmup_steps or 0):
        raise ValueError(
            f"the schedule ends at step {decay} (--optimizer.decay_steps, or --steps) before its warm-up of "
            f"{options.optimizer.warmup_steps} steps (--optimizer.warmup_steps) does"
        )


def choose_accelerator(asked: str) -> str:
    """ "cuda" or "cpu".

    Raises:
        ValueError: neither is meant, or there is no GPU.
    """
    if asked not in ("auto", "cpu", "gpu", "cuda"):
        raise ValueError(f"--accelerator {asked} is not supported; it takes cpu, cuda (or gpu), or auto")
    if asked in ("gpu", "cuda") and not torch.cuda.is_available():
        raise ValueError(f"--accelerator {asked}, but torch {torch.__version__} finds no CUDA device here; use cpu")
    if os.environ.get("LT_STRATEGY"):
        raise ValueError(
            "--strategy is not for this program: it always trains with ModelParallelStrategy; leave it out"
        )
    return "cuda" if asked != "cpu" and torch.cuda.is_available() else "cpu"


def run_manifest(out: str, resume: str) -> dict[str, Any] | None:
    """The manifest of the checkpoint that a run would go on from, if it has a readable one; refusals come later."""
    try:
        path = checkpoints.latest(Path(out) / "checkpoints") if resume == "auto" else Path(resume)
        return checkpoints.read_manifest(path) if path and resume != "never" else None
    except (ValueError, OSError):
        return None


def _model_of(manifest: dict[str, Any] | None) -> str | None:
    """--model of the run that a checkpoint is of; imported weights alone are of none."""
    return (manifest or {}).get("options", {}).get("model")


def open_source(init_from: str | None, going_on: bool) -> "Weights | CheckpointWeights | None":
    """The weights that the run starts from, all tensors accounted for and none read; None for seeded random ones.

    `going_on`: the run has a checkpoint, so that the weights need not be there any more.

    Raises:
        ValueError, FileNotFoundError: they are missing, damaged, or of another kind of model.
    """
    if init_from is None or (going_on and not Path(init_from).exists()):
        return None
    if not init_from:
        raise ValueError("--init_from is empty; it takes a folder of weights, a checkpoint or a run folder")
    path = Path(init_from)
    if (path / "checkpoints").is_dir():
        path = checkpoints.latest(path / "checkpoints") or path
    if (path / checkpoints.MANIFEST).is_file():
        from checkpoints.convert import CheckpointWeights

        return CheckpointWeights(path, check_files=int(os.environ.get("RANK", 0)) == 0)
    return open_weights(path)


def find_config(
    options: Options, source: "Weights | CheckpointWeights | None", manifest: dict[str, Any] | None
) -> LlamaConfig:
    """The config of a preset, or of a folder with a Hugging Face config.json; it must be that of the source's weights.

    The model that a run began with is taken from its checkpoint's manifest where the folder is gone.

    Raises:
        ValueError, FileNotFoundError: it is neither, describes another kind of model, or other weights than the
            source's; the differing values are named.
    """
    model = options.model
    if source is not None and model == options.init_from:
        config = source.config
    elif model in PRESETS:
        config = LlamaConfig.preset(model)
    elif _model_of(manifest) == model and not (Path(model) / "config.json").is_file():
        config = LlamaConfig.from_dict(manifest["model"])
    elif Path(model).is_dir():
        config = LlamaConfig.from_hf(model)
    else:
        raise ValueError(f"--model {model} is neither a folder nor one of the presets {', '.join(PRESETS)}")
    if source is not None:
        theirs = source.config.to_dict()
        differing = [
            f"{key} is {value} in --model, {theirs[key]} in --init_from"
            for key, value in config.to_dict().items()
            if value != theirs[key] and key != "max_position"
        ]
        if differing:
            raise ValueError(
                f"--model {model} is not the model of --init_from {options.init_from}: {'; '.join(differing)}; leave "
                "--model out to take theirs"
            )
    return config


@dataclass(frozen=True)
class Corpus:
    """The data of a run: what is trained on by source, what is held out, and what a checkpoint says of it"""

    datasets: dict[str, TokenDataset | RandomTokens]
    weights: dict[str, float]
    held_out: HeldOut | None  # None for random tokens
    begin_id: int | None
    end_id: int | None
    described: dict[str, Any]


def open_data(fabric: "Fabric", options: Options, config: LlamaConfig) -> Corpus:
    """Open every source of --data.path.

    Raises:
        ValueError, FileNotFoundError: a token folder is missing, damaged, of a larger vocabulary than the model's, or
            of another tokenizer than the others.
    """
    length = options.data.sequence_length
    described = {
        "sequence_length": length,
        "seed": options.seed,
        "mask_documents": options.data.mask_documents,
    }
    if options.data.path == "random":
        if options.data.mask_documents:
            raise ValueError("--data.mask_documents with --data.path random: random tokens are no documents")
        sources = {"random": RandomTokens(config.vocab_size, length, options.seed)}
        described |= {"fingerprint": f"random-{config.vocab_size}", "sources": {"random": "random"}}
        return Corpus(sources, {"random": 1.0}, None, None, None, described)
    problem = None
    if options.data.path is None and fabric.local_rank == 0:
        try:
            prepare_default()
        except (ValueError, OSError) as error:
            problem = (
                f"the default text cannot be kept at {default_folder()} ({error}); set XDG_CACHE_HOME or --data.path"
            )
    problem = fabric.broadcast(problem)
    if problem:
        raise ValueError(problem)
    folders, weights = parse_sources(options.data.path or str(default_folder()))
    datasets = {name: TokenDataset(folder, length) for name, folder in folders.items()}
    first = next(iter(datasets.values())).index
    for name, dataset in datasets.items():
        if dataset.index["vocab_size"] > config.vocab_size:
            raise ValueError(
                f"{folders[name]} holds ids of a vocabulary of {dataset.index['vocab_size']:,}, but model "
                f"{options.model} has {config.vocab_size:,}; choose a model with a vocabulary at least as large, or "
                "prepare the text anew"
            )
        for key in ("tokenizer", "tokenizer_sha256", "vocab_size", "begin_id", "end_id"):
            if dataset.index.get(key) != first.get(key):
                raise ValueError(
                    f"the sources of --data.path are of different tokenizers: {key} is {first.get(key)} in "
                    f"{next(iter(folders.values()))}, {dataset.index.get(key)} in {folders[name]}"
                )
    if options.data.mask_documents and first["begin_id"] is None and first["end_id"] is None:
        raise ValueError(
            f"--data.mask_documents, but {next(iter(folders.values()))} says neither which id begins a document nor "
            "which ends one"
        )
    fingerprints = {name: fingerprint(dataset.index) for name, dataset in datasets.items()}
    whole = hashlib.sha256(json.dumps(fingerprints, sort_keys=True).encode()).hexdigest()[:16]
    described |= {
        "fingerprint": whole if len(fingerprints) > 1 else next(iter(fingerprints.values())),
        "sources": fingerprints,
    }
    held_out = HeldOut([TokenDataset(folder, length, "validation") for folder in folders.values()])
    return Corpus(datasets, weights, held_out, first["begin_id"], first["end_id"], described)


def parse_sources(path: str) -> tuple[dict[str, Path], dict[str, float]]:
    """Folder and weight of each source of `FOLDER` or `FOLDER=WEIGHT,FOLDER=WEIGHT,...`, by its last name.

    Raises:
        ValueError: a weight is missing or no number above 0, or two folders have the same name.
    """
    if "=" not in path or Path(path).is_dir():
        return {Path(path).name or path: Path(path)}, {Path(path).name or path: 1.0}
    folders: dict[str, Path] = {}
    weights: dict[str, float] = {}
    for part in path.split(","):
        folder, _, weight = part.strip().rpartition("=")
        name = Path(folder).name
        try:
            weights[name] = float(weight)
        except ValueError:
            raise ValueError(f"--data.path {path}: '{part}' is not FOLDER=WEIGHT") from None
        if not folder or name in folders:
            raise ValueError(f"--data.path {path}: the sources need folders of different names, '{part}' has none")
        folders[name] = Path(folder)
    Mixture([Era(0, weights)])  # refuses weights that are none
    return folders, weights


def find_checkpoint(fabric: "Fabric", options: Options) -> Path | None:
    """The checkpoint that the run goes on from, found by rank 0 for all; None for a fresh start.

    Raises:
        ValueError: the run folder is in use or unusable, holds newer checkpoints than the one to go on from, or the
            checkpoint is missing or damaged.
    """
    problem, path = None, None
    if fabric.is_global_zero:
        out = Path(options.out)
        try:
            for folder in (out, out / "checkpoints", *out.absolute().parents):
                if folder.exists() and not folder.is_dir():
                    raise ValueError(f"the run cannot be kept in {out}: {folder} is not a folder; choose another --out")
            existing = next(folder for folder in (out.absolute(), *out.absolute().parents) if folder.exists())
            if not os.access(existing, os.W_OK):
                raise ValueError(f"the run cannot be kept in {out}: {existing} is not writable; choose another --out")
            saved = checkpoints.steps(out / "checkpoints")
            if options.resume == "never" and (saved or (out / "metrics.csv").exists()):
                raise ValueError(
                    f"--resume never, but the run folder {out} is in use (it holds a run's metrics or checkpoints); "
                    "choose another folder with --out, or go on from its newest checkpoint with --resume auto"
                )
            if options.resume == "auto":
                path, wrong = checkpoints.newest_good(out / "checkpoints")
                if wrong and path is None:
                    raise ValueError(
                        f"none of the {len(wrong)} checkpoints in {out}/checkpoints is good: {wrong[0]}; repair it, or "
                        "start anew in another folder with --out"
                    )
                for reason in wrong:
                    print(f"WARNING: a newer checkpoint is passed over: {reason}", file=sys.stderr, flush=True)
            elif options.resume != "never":
                path = Path(options.resume)
                step = checkpoints.verify(path)["step"]
                if saved and saved[-1][0] > step:
                    raise ValueError(
                        f"{path} is of step {step}, but {out} holds a checkpoint of step {saved[-1][0]}: to go on from "
                        "an earlier step, choose another folder with --out"
                    )
            rows_up_to(out / "metrics.csv", 0)
        except (ValueError, OSError) as error:
            problem = str(error)
    problem, path = fabric.broadcast((problem, path))
    if problem:
        raise ValueError(problem)
    return path


def describe(
    options: Options,
    config: LlamaConfig,
    layout: Layout,
    data: dict[str, Any],
    source: dict[str, str] | None,
) -> dict[str, Any]:
    """What a checkpoint is of: goes into its manifest, and is compared with the run that resumes from it."""
    return {
        "model": config.to_dict(),
        "data": data,
        "mesh": {"data": layout.data, "tensor": layout.tensor},
        "source": source,
        "options": asdict(options),
    }


def collect_assets(imported: dict[str, Path], held_out: HeldOut | None) -> dict[str, bytes]:
    """The files that travel with the weights into every checkpoint and from there to an export: name -> content.

    What came with the imported weights, but the tokenizer, and the ids that begin and end a text, are the data's.
    """
    assets = {name: path.read_bytes() for name, path in imported.items()}
    tokenizer = held_out.tokenizer if held_out is not None else None
    if tokenizer is None:
        return assets
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save(Path(folder))
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    if any(name.startswith("tokenizer.") and assets.get(name) == content for name, content in files.items()):
        return assets
    special = {"bos_token_id": tokenizer.begin_id, "eos_token_id": tokenizer.end_id}
    for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json",
                 "added_tokens.json", "chat_template.jinja"):  # fmt: skip
        assets.pop(name, None)
    if "config.json" in assets:
        assets["config.json"] = json.dumps({**json.loads(assets["config.json"]), **special}, indent=2).encode()
    assets["generation_config.json"] = json.dumps({"_from_model_config": True, **special}, indent=2).encode()
    return assets | files


def check_resume(path: Path, described: dict[str, Any], weights: dict[str, float], options: Options) -> int:
    """Compare a checkpoint with the run that is to go on from it, and return its step.

    `described` gets from it what goes on: the weights that the run began from, and the eras of its mixture.

    Raises:
        ValueError: it is of another model or other data, or began from other weights; both values are named.
    """
    manifest = checkpoints.read_manifest(path)
    if manifest.get("weights_only"):
        raise ValueError(f"{path} holds weights alone, not a run to go on with; start from it with --init_from {path}")
    began, now = manifest.get("source"), described["source"]
    if now is not None and (began or {}).get("fingerprint") != now["fingerprint"]:
        there = f"{began['path']} ({began['fingerprint']})" if began else "random ones"
        raise ValueError(
            f"{path} is of a run that began from other weights: {there} there, {now['path']} ({now['fingerprint']}) "
            "here; leave --init_from out to go on, or start anew in another folder with --out"
        )
    described["source"] = began
    differing = differences(manifest["model"], described["model"])
    if differing:
        raise ValueError(
            f"{path} is a checkpoint of another model: {differing}; repeat its options, or start anew in another "
            "folder with --out"
        )
    described["data"]["eras"] = continue_eras(path, manifest, described["data"], weights, options.data.change_from)
    return manifest["step"]


def differences(saved: dict[str, Any], now: dict[str, Any]) -> str:
    """What differs between a checkpoint and this run, both values named; empty where nothing does."""
    keys = [key for key in now if saved.get(key) != now[key]]
    return "; ".join(f"{key} is {saved.get(key)} there, {now[key]} here" for key in keys)


def continue_eras(
    path: Path, manifest: dict[str, Any], data: dict[str, Any], weights: dict[str, float], change_from: int | None
) -> list[dict[str, Any]]:
    """Which mixture holds from which sample on: the checkpoint's eras, and one more where the data is to change.

    Raises:
        ValueError: the data is another, and it is not said from which sample on, or from one that is done already.
    """
    saved, done = manifest["data"], manifest["samples"]
    eras = saved["eras"]
    now = {key: value for key, value in data.items() if key != "eras"} | {"weights": weights}
    differing = differences(saved | {"weights": eras[-1]["weights"]}, now)
    if not differing:
        return eras
    if change_from is None:
        raise ValueError(
            f"{path} is a checkpoint of other data: {differing}; repeat its options, start anew in another folder "
            f"with --out, or let the new ones hold from a sample on with --data.change_from {done} (samples done: "
            f"{done}) or later"
        )
    if change_from < done:
        raise ValueError(f"--data.change_from {change_from}, but {path} has trained on {done} samples already")
    common = saved["sources"].keys() & data["sources"].keys()
    fresh = any(saved[key] != data[key] for key in ("sequence_length", "seed")) or any(
        saved["sources"][name] != data["sources"][name] for name in common
    )
    if change_from > done and (fresh or not saved["sources"].keys() <= data["sources"].keys()):
        raise ValueError(
            f"up to sample {change_from} (--data.change_from) the data of {path} holds, but it is not given here: "
            f"{differing}; change at the checkpoint's own sample, --data.change_from {done}"
        )
    return [*eras, {"start": change_from, "weights": weights, "fresh": fresh}]


def main(arguments: list[str] | None = None) -> None:
    """Parse, check, launch, build, train: the program."""
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="replace")  # a sample may hold what the terminal cannot show
    try:
        options, resolved = parse(sys.argv[1:] if arguments is None else arguments)
        check_options(options)
        manifest = run_manifest(options.out, options.resume)
        source = open_source(options.init_from, going_on=manifest is not None)
        config = find_config(options, source, manifest)
        accelerator = choose_accelerator(os.environ.get("LT_ACCELERATOR", "auto"))
        on_gpu = accelerator == "cuda"
        precision = check_precision(os.environ.get("LT_PRECISION") or ("bf16-mixed" if on_gpu else "32-true"))
        devices = int(os.environ.get("WORLD_SIZE", 1))  # set by fabric run and torchrun
        devices_per_node = int(os.environ.get("LOCAL_WORLD_SIZE", devices))
        layout = choose_layout(
            config,
            devices=devices,
            devices_per_node=devices_per_node,
            data=options.parallel.data,
            tensor=options.parallel.tensor,
            sequence_length=options.data.sequence_length,
            global_batch=options.data.global_batch_size,
            micro_batch=options.data.micro_batch_size,
        )
    except (ValueError, OSError) as error:
        refuse(error)

    stopping = Stopping(options.max_minutes)
    from lightning.fabric import Fabric  # after the checks: its import takes seconds, which --help need not wait for
    from lightning.fabric.strategies import ModelParallelStrategy

    def cut(model: Llama, mesh: dist.DeviceMesh) -> Llama:
        """Shard the empty model, then give each rank memory and weights for its part alone."""
        recompute, compile = options.parallel.recompute, options.parallel.compile
        parallelize(model, mesh, precision=precision, recompute=recompute, compile=compile)
        model.to_empty(device=fabric.device)
        if checkpoint is None and isinstance(source, Weights):
            load_weights(model, source, write_shard)
        elif checkpoint is None and source is None:
            init_weights(model, options.seed, write_shard)
        return model  # a checkpoint is loaded later, with the optimizer

    strategy = ModelParallelStrategy(
        parallelize_fn=cut,
        data_parallel_size=layout.data,
        tensor_parallel_size=layout.tensor,
        save_distributed_checkpoint=options.checkpoints.distributed,
        timeout=timedelta(seconds=options.parallel.timeout_seconds),
    )
    # Fabric takes both from the environment, where `fabric run` puts its options. For bf16-mixed it is told fp32: the
    # policy of FSDP2 does the mixing; Fabric's autocast on top would run every norm, and gather its result, in fp32.
    os.environ["LT_ACCELERATOR"] = accelerator
    os.environ["LT_PRECISION"] = "32-true" if precision == "bf16-mixed" else precision
    if os.environ.get("LT_CLI_USED"):  # fabric run: its processes are launched already
        fabric = Fabric(strategy=strategy)
    else:
        fabric = Fabric(strategy=strategy, devices=devices_per_node, num_nodes=devices // devices_per_node)
        fabric.launch()

    try:
        corpus = open_data(fabric, options, config)
        began = fabric.broadcast(source.describe()) if source else None
        corpus.described["eras"] = [{"start": 0, "weights": corpus.weights, "fresh": False}]
        described = describe(options, config, layout, corpus.described, began)
        checkpoint = find_checkpoint(fabric, options)
        if checkpoint is None and options.data.change_from is not None:
            raise ValueError(
                f"--data.change_from {options.data.change_from} is for a run that goes on, but {options.out} holds no "
                "checkpoint; leave it out"
            )
        done = check_resume(checkpoint, described, corpus.weights, options) if checkpoint else 0
        lock = take_lock(fabric, options.out) if done < options.steps else None
    except (ValueError, OSError) as error:
        refuse(error)
    masking = options.data.mask_documents
    training = Shuffled(
        corpus.datasets,
        Mixture([Era(**era) for era in described["data"]["eras"]]),
        options.seed,
        corpus.begin_id if masking else None,
        corpus.end_id if masking else None,
    )
    held_out = corpus.held_out

    if done >= options.steps:
        fabric.print(
            f"{options.out} has already reached step {done} of {options.steps}. To go on: --steps {2 * done}. To train "
            "anew: --out with another folder (and --resume never, to be sure that nothing is continued)."
        )
    else:
        out = Path(options.out)
        if fabric.is_global_zero:
            out.mkdir(parents=True, exist_ok=True)
            (out / "config.yaml").write_text(resolved)
            begin_metrics(out / "metrics.csv", done, training.names)
            checkpoints.sweep(out / "checkpoints")
            if checkpoint and options.resume == "auto":
                checkpoints.set_aside(out / "checkpoints", checkpoint)
        with fabric.init_module(empty_init=True):
            model = Llama(config)
        model = fabric.setup(model)
        limit_waiting(fabric, options.parallel.timeout_seconds)
        optimizer = fabric.setup_optimizers(make_optimizer(model, options.optimizer))
        progress = {"step": 0, "samples": 0, "tokens": 0}
        imported: dict[str, Path] = {}
        if checkpoint:
            progress = checkpoints.load(fabric, checkpoint, model, optimizer)
            imported = checkpoints.assets(checkpoint)
        elif source:
            imported = source.assets
            if not isinstance(source, Weights):
                checkpoints.load_model(fabric, source.path, model)
        assets = collect_assets(imported, held_out) if fabric.is_global_zero else {}
        announce(fabric, options, config, layout, precision, corpus.described["fingerprint"], checkpoint)
        if source and held_out and not checkpoint:  # a wrong import is seen here, before any training
            metrics = validate(fabric, model, held_out, training, layout, options.validate.sequences)
            report(fabric, options, {**progress, **metrics})
        state = RunState(progress, described, assets)
        try:
            train(fabric, model, optimizer, training, held_out, layout, options, state, stopping)
        except (FloatingPointError, OSError) as error:  # every rank has it
            refuse(error, code=1)
        finally:
            if lock is not None:
                lock.release()
        if fabric.is_global_zero:
            plot_loss(out / "metrics.csv", out / "loss.png")
            finished = progress["step"] == options.steps
            status = {"step": progress["step"], "steps": options.steps, "finished": finished}
            (out / "status.json").write_text(json.dumps(status) + "\n")
            if finished:
                print(f"Done. See {out}/loss.png, samples.md, metrics.csv, checkpoints/.", flush=True)
            else:
                print(
                    f"Stopped ({stopping.reason or 'another rank was asked to'}) after step {progress['step']} of "
                    f"{options.steps}, saved. The same command goes on.",
                    flush=True,
                )
    fabric.barrier()
    dist.destroy_process_group()  # leaving without it can abort at exit
    stopping.restore()


def take_lock(fabric: "Fabric", out: str) -> checkpoints.RunLock | None:
    """The run folder for this run alone; rank 0 holds it for all.

    Raises:
        ValueError, OSError: on all ranks, if another run has it.
    """
    lock, problem = None, None
    if fabric.is_global_zero:
        try:
            lock = checkpoints.RunLock(Path(out))
        except (ValueError, OSError) as error:
            problem = str(error)
    problem = fabric.broadcast(problem)
    if problem:
        raise ValueError(problem)
    return lock


def limit_waiting(fabric: "Fabric", seconds: int) -> None:
    """Let every group of the mesh give up on a silent rank after this time, as the strategy's own time-out does for
    the group of all ranks alone: the mesh's groups keep PyTorch's 30 minutes otherwise."""
    mesh = fabric.strategy.device_mesh
    for group in (*mesh.get_all_groups(), mesh._flatten().get_group()):
        # the one way to change a group's time-out once it is made (torch 2.11 to 2.13; a test stops a rank)
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=seconds), group)


def parse(arguments: list[str]) -> tuple[Options, str]:
    """Options from the command line and recipes, and the same as resolved YAML.

    Raises:
        ValueError: an unknown option or a value of the wrong type.
    """
    set_parsing_settings(docstring_parse_attribute_docstrings=True)
    parser = ArgumentParser(
        prog="fabric_train.py",
        usage="fabric run fabric_train.py --devices N [--config RECIPE.yaml] [options]",
        description="Train a Llama with tensor parallelism and FSDP2 on Lightning Fabric.",
        epilog="Example: fabric run fabric_train.py --devices 4 --steps 500 --optimizer.lr 2e-3 --out runs/mine",
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", help="YAML recipe; options after it override it")
    parser.add_class_arguments(Options)
    arguments = take_fabric_options(arguments)
    shows = any(word in ("-h", "--help") or word.startswith("--print_config") for word in arguments)
    if shows and int(os.environ.get("RANK", 0)):
        sys.exit(0)  # one page, not one a process
    try:
        parsed = parser.parse_args(arguments)
    except ArgumentError as error:
        known = [option for action in parser._actions for option in action.option_strings]
        raise ValueError(explain(str(error), known)) from None
    for section in ("data", "optimizer", "parallel", "checkpoints", "validate", "log"):
        if not isinstance(parsed[section], Namespace):
            raise ValueError(f"`{section}` of the recipe is {parsed[section]}; it takes a mapping of its options")
    if parsed.model is None:
        parsed.model = parsed.init_from or _model_of(run_manifest(parsed.out, parsed.resume)) or "tiny"
    values = dict(parser.instantiate(parsed).items())
    values.pop("config")
    return Options(**values), parser.dump(parsed, skip_unset=False)


def take_fabric_options(arguments: list[str]) -> list[str]:
    """Let --accelerator and --precision mean under python and torchrun what they mean to `fabric run`.

    `fabric run` takes its own options off the line and passes these two on as LT_ACCELERATOR and LT_PRECISION.

    Raises:
        ValueError: an option of `fabric run` that only a launcher can follow.
    """
    remaining = []
    pending = list(arguments)
    while pending:
        name, separator, value = pending.pop(0).partition("=")
        if name in ("--devices", "--strategy", "--num-nodes", "--node-rank", "--main-address", "--main-port"):
            raise ValueError(
                f"{name} is an option of the launcher: `fabric run fabric_train.py {name} ...`; "
                "with torchrun the number of processes is --nproc-per-node"
            )
        if name in ("--accelerator", "--precision"):
            if not separator:
                if not pending:
                    raise ValueError(f"{name} takes a value")
                value = pending.pop(0)
            if not value:
                raise ValueError(f"{name} takes a value")
            os.environ["LT_" + name[2:].upper()] = value
        else:
            remaining.append(name + separator + value)
    return remaining


def explain(message: str, known: list[str]) -> str:
    """A parser's message as one paragraph, with the nearest known option beside an unknown one."""
    message = " ".join(message.split())
    for word in message.split():
        word = word.partition("=")[0].rstrip(":")
        near = difflib.get_close_matches(word, known, n=1)
        if word.startswith("--") and word not in known and near:
            message += f"; did you mean {near[0]}?"
    return message + "; `--help` lists all options"


def announce(
    fabric: "Fabric",
    options: Options,
    config: LlamaConfig,
    layout: Layout,
    precision: str,
    data_fingerprint: str,
    checkpoint: Path | None,
) -> None:
    """What this run is, in a few lines."""
    per_step = options.data.global_batch_size * options.data.sequence_length
    text = options.data.path or "the Python standard library's source"
    begin = f"from {options.init_from}" if options.init_from else f"random, seed {options.seed}"
    begin = f"resumed from {checkpoint}" if checkpoint else begin
    fabric.print(
        f"Llama {options.model}, {config.parameters:,} parameters, {precision} on {fabric.device.type}\n"
        f"mesh: data-parallel {layout.data} x tensor-parallel {layout.tensor}, micro-batches of {layout.micro_batch} "
        f"x {options.data.sequence_length} tokens, {layout.accumulation} a step\n"
        f"data: {text} ({data_fingerprint}), {per_step:,} tokens a step, {options.steps} steps\n"
        f"weights: {begin}\n"
        f"run folder: {options.out}"
    )


def refuse(error: Exception, code: int = 2) -> None:
    """End with one paragraph and an exit code. Rank 0 speaks; others wait for the launcher to end them."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if int(os.environ.get("RANK", 0)):
        time.sleep(10)  # rank 0 ends first and its launcher then ends this one; if not, this rank speaks for itself
    print(f"error: {error}", file=sys.stderr, flush=True)
    sys.exit(code)


if __name__ == "__main__":
    main()
