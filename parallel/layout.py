"""Which meshes are allowed, what `auto` chooses, and the precisions: every refusal comes with its numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from llama.config import LlamaConfig

PRECISIONS = ("32-true", "bf16-mixed", "bf16-true")


@dataclass(frozen=True)
class Layout:
    """How the devices are used: mesh sizes, and how a global batch falls into micro-batches.

    The mesh is (data, tensor) with the tensor axis innermost: the ranks of one tensor-parallel group are neighbours.
    """

    data: int  # data-parallel size
    tensor: int  # tensor-parallel size
    micro_batch: int  # sequences a device runs at once
    accumulation: int  # micro-batches an optimizer step


def choose_layout(
    config: LlamaConfig,
    *,
    devices: int,
    devices_per_node: int,
    data: int | str,
    tensor: int | str,
    sequence_length: int,
    global_batch: int,
    micro_batch: int | None,
) -> Layout:
    """Resolve `auto` and `node`, then check every size against every other.

    ``tensor="auto"`` is 2 where a node's device count and the model's shape allow it, else 1; ``"node"`` is all devices
    of a node. ``data="auto"`` is the rest; ``"node"`` the number of nodes. ``micro_batch=None`` runs the whole share of
    a device at once.

    Raises:
        ValueError: a size that does not fit another; the message holds the numbers and what would work.
    """
    fixed_tensor = _size("parallel.tensor", tensor)
    fixed_data = _size("parallel.data", data)
    if tensor == "node":
        fixed_tensor = devices_per_node
    if data == "node":
        fixed_data = max(1, devices // devices_per_node)
    if fixed_tensor is None and fixed_data is not None and devices % fixed_data == 0:
        fixed_tensor = devices // fixed_data
    if fixed_tensor is None:
        fits = devices_per_node % 2 == 0 and not _indivisible(config, sequence_length, 2)
        fixed_tensor = 2 if fits and fixed_data is None else 1
    if fixed_data is None:
        fixed_data = max(1, devices // fixed_tensor)

    if fixed_data * fixed_tensor != devices:
        raise ValueError(
            f"data-parallel size {fixed_data} x tensor-parallel size {fixed_tensor} is {fixed_data * fixed_tensor}, "
            f"but the run has {devices} device{'s' * (devices != 1)}; choose --parallel.data and --parallel.tensor so "
            f"that they multiply to {devices}, or start {fixed_data * fixed_tensor} processes"
        )
    wrong = _indivisible(config, sequence_length, fixed_tensor)
    if wrong:
        smaller = (t for t in range(1, fixed_tensor) if devices % t == 0)
        largest = max(t for t in smaller if not _indivisible(config, sequence_length, t))
        raise ValueError(
            f"tensor-parallel size {fixed_tensor} does not divide {', '.join(wrong)}; the largest size below it that "
            f"works is {largest} (--parallel.tensor {largest})"
        )

    if global_batch < 1:
        raise ValueError(f"--data.global_batch_size is {global_batch}; it takes a number of at least 1")
    if global_batch % fixed_data:
        raise ValueError(
            f"a global batch of {global_batch} sequences cannot be shared evenly by {fixed_data} data-parallel ranks; "
            f"make --data.global_batch_size a multiple of {fixed_data}"
        )
    share = global_batch // fixed_data
    micro_batch = share if micro_batch is None else micro_batch
    if micro_batch < 1 or share % micro_batch:
        raise ValueError(
            f"a global batch of {global_batch} sequences over {fixed_data} data-parallel ranks leaves {share} to each, "
            f"which micro-batches of {micro_batch} do not divide; the largest smaller size that does is "
            f"--data.micro_batch_size {_largest_divisor(share, micro_batch)}"
        )
    return Layout(fixed_data, fixed_tensor, micro_batch, share // micro_batch)


def _largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is no larger than `limit`; 1 where there is none."""
    pairs = ((small, number // small) for small in range(1, math.isqrt(number) + 1) if number % small == 0)
    return max((divisor for pair in pairs for divisor in pair if divisor <= limit), default=1)


def _size(option: str, value: int | str) -> int | None:
    """A mesh size given as a number, or None where it is still to be chosen."""
    if value in ("auto", "node"):
        return None
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"--{option} is {value}; it takes a number of at least 1, `auto` or `node`")
    return value


def _indivisible(config: LlamaConfig, sequence_length: int, tensor: int) -> list[str]:
    """What a tensor-parallel size does not divide, each as a phrase with its number."""
    sizes = {
        "query heads": config.n_heads,
        "KV heads": config.n_kv_heads,
        "feed-forward width": config.ffn_dim,
        "vocabulary": config.vocab_size,
        "sequence length": sequence_length,
    }
    return [f"{size} ({name})" for name, size in sizes.items() if size % tensor]


def check_precision(precision: str) -> str:
    """Fabric's name of the precision, its aliases resolved.

    Raises:
        ValueError: a precision that this loop does not train in.
    """
    resolved = {"32": "32-true", "bf16": "bf16-mixed"}.get(precision, precision)
    if resolved not in PRECISIONS:
        raise ValueError(
            f"--precision {precision} is not supported; choose 32-true (all fp32), bf16-mixed (fp32 weights and "
            "optimizer, bf16 compute, fp32 gradient reduction) or bf16-true (all bf16)"
        )
    return resolved
