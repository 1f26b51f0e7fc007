"""How a Llama is cut over a (data, tensor) mesh: two literal tables and the function that applies them.

Shape letters as in llama/model.py; d and t are the data- and tensor-parallel sizes. Between blocks every rank of a
tensor-parallel group holds S/t positions (sequence parallelism); inside attention and feed-forward it holds all S
positions of its H/t heads or F/t features (arXiv 1909.08053 and 2205.05198).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from llama.hf import StoredTensor
from llama.model import Llama

Recompute = Literal["none", "selective", "full"]

# Module path -> style. A column-parallel matrix holds rows of its (out, in) weight, a row-parallel one columns.
ROOT_PLAN = {
    # weight (V/t, D): every rank looks up its own rows, the sum is scattered over positions
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
}
OUTPUT_PLAN = {  # (B, S/t, D) -> logits (B, S, V/t), left as a DTensor for loss_parallel
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
}
TIED_OUTPUT_PLAN = {  # the same layouts; the weight is the embedding's own (V/t, D), so only the input moves
    "output": PrepareModuleInput(
        input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None), use_local_output=False
    ),
}
BLOCK_PLAN = {
    "attention_norm": SequenceParallel(),  # (B, S/t, D)
    "attention": PrepareModuleInput(  # (B, S/t, D) -> (B, S, D); the rotary tables are plain tensors
        input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
    ),
    "attention.wq": ColwiseParallel(),  # (B, S, D) -> (B, S, H/t * K)
    "attention.wk": ColwiseParallel(),
    "attention.wv": ColwiseParallel(),
    "attention.wo": RowwiseParallel(output_layouts=Shard(1)),  # (B, S, H/t * K) -> (B, S/t, D)
    "ffn_norm": SequenceParallel(),
    "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "feed_forward.w1": ColwiseParallel(),  # (B, S, D) -> (B, S, F/t)
    "feed_forward.w3": ColwiseParallel(),
    "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),  # (B, S, F/t) -> (B, S/t, D)
}


def parallelize(
    model: Llama,
    device_mesh: DeviceMesh,
    *,
    precision: str = "32-true",
    recompute: Recompute = "none",
    compile: bool = False,
) -> Llama:
    """Cut the model over the mesh in place and return it: tensor parallel, recompute, compile, FSDP2.

    Args:
        model: on the meta device, or with equal weights on every rank.
        device_mesh: two axes named "data_parallel" and "tensor_parallel"; a size of 1 is fine for both.
        precision: Fabric's name; see ``precision_policy``.
        recompute: activation checkpointing of each block.
        compile: `torch.compile` each block, in place: no name in the state dict changes.
    """
    device_mesh._flatten()  # lets the gradient norm be summed over the whole mesh in one reduction
    tensor_mesh, data_mesh = device_mesh["tensor_parallel"], device_mesh["data_parallel"]
    if tensor_mesh.size() > 1:
        output_plan = TIED_OUTPUT_PLAN if model.config.tied_embeddings else OUTPUT_PLAN
        parallelize_module(model, tensor_mesh, ROOT_PLAN | output_plan)
        for block in model.layers:
            parallelize_module(block, tensor_mesh, BLOCK_PLAN)
        model.tok_embeddings.register_forward_hook(_wait_for_embedding)

    for block in model.layers:
        block.recompute = recompute
        if compile and recompute == "full":
            # checkpoint outside, compiled code inside: with both inside, AOTAutograd saves the device mesh of the
            # recomputed collectives for backward and fails on it (torch 2.13)
            block.layer = torch.compile(block.layer, fullgraph=True, dynamic=False)
        elif compile:
            block.compile(fullgraph=True, dynamic=False)

    # Always sharded, also on a data axis of 1: one code path, one precision, and DTensors that fabric.save accepts.
    shard = {"mesh": data_mesh, "mp_policy": precision_policy(precision)}
    for block in model.layers:
        fully_shard(block, **shard)
    if not model.config.tied_embeddings:
        fully_shard(model.tok_embeddings, **shard)
        fully_shard([model.norm, model.output], reshard_after_forward=False, **shard)  # used again at once
    fully_shard(model, **shard)  # what is left; for a tied model the matrix that both ends use
    for module in model.modules():
        if hasattr(module, "set_gradient_divide_factor"):
            # The loss is a sum over this rank's tokens, already divided by the token count of the whole mesh:
            # gradients are to be summed, while FSDP2 by default averages them over the data axis.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def precision_policy(precision: str) -> MixedPrecisionPolicy:
    """FSDP2's policy for one of Fabric's precisions, the same on every mesh.

    ==========  ==================  ========  ===================
    precision   weights, optimizer  compute   gradient reduction
    ==========  ==================  ========  ===================
    32-true     fp32                fp32      fp32
    bf16-mixed  fp32                bf16      fp32
    bf16-true   bf16                bf16      fp32
    ==========  ==================  ========  ===================
    """
    compute = torch.float32 if precision == "32-true" else torch.bfloat16
    return MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32, cast_forward_inputs=False)


def write_shard(parameter: Tensor, full: Tensor | StoredTensor) -> None:
    """Store this rank's part of a full tensor in a parameter that ``parallelize`` has cut; no communication.

    Args:
        parameter: a DTensor as ``parallelize`` leaves it, or a plain tensor.
        full: the whole tensor, equal on every rank, any float dtype, in memory or on disk; it is sliced once, so from
            disk only this rank's part is read.
    """
    local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
    if local.numel():
        local.copy_(full[local_part(parameter)])


def local_part(parameter: Tensor) -> tuple[slice, ...]:
    """Which part of the whole tensor this rank holds: one slice an axis of the tensor; empty ones where it has none."""
    part = [(0, size) for size in parameter.shape]
    if isinstance(parameter, DTensor):
        # The tensor axis was cut first and the data axis cut what was left: last mesh axis first.
        for axis in reversed(range(parameter.device_mesh.ndim)):
            placement = parameter.placements[axis]
            if not placement.is_replicate():  # Shard, or the strided shard that a twice-cut axis has
                start, stop = part[placement.dim]
                chunk = -(-(stop - start) // parameter.device_mesh.size(axis))  # as torch.chunk cuts
                low = min(start + parameter.device_mesh.get_local_rank(axis) * chunk, stop)
                part[placement.dim] = (low, min(low + chunk, stop))
    return tuple(slice(start, stop) for start, stop in part)


def plain(tensor: Tensor) -> Tensor:
    """The whole tensor behind a DTensor (every rank must ask for it together), or a plain tensor as it is."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _wait_for_embedding(module: nn.Module, args: tuple, output: Tensor) -> Tensor:
    # The embedding's reduce-scatter is asynchronous, and its result a tensor that waits when it is first used. A
    # compiled block that receives it unawaited drops the gradient that flows back through it: the embedding's gradient
    # is then exactly zero, with no error (torch 2.11 to 2.13). One eager operation waits and keeps the graph whole.
    return output.clone()
