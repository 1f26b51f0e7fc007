"""Llama 3 in plain PyTorch: the maths and its initialisation. It knows nothing of devices, meshes or trainers.

Shape letters: B sequences, S positions, D dim, H query heads, G key/value heads, K head_dim, F ffn_dim, V vocabulary.
Under tensor parallelism of size t the same code sees S/t positions between blocks and H/t, G/t, F/t inside them: no
module reads a head count from the config, it follows from the width that a projection returns.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from llama.config import LlamaConfig

BLOCK = 128  # tokens in a block of a document mask; flex_attention's own default


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis, the mean in fp32 (arXiv 1910.07467)."""

    def __init__(self, dim: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, (x.shape[-1],), self.weight, self.eps)


def rope_frequencies(config: LlamaConfig, device: torch.device | None = None) -> Tensor:
    """Inverse frequencies of the K/2 rotated pairs, fp32, in radians a position, scaled as Llama 3.1 / 3.2 do.

    Pair k turns theta^(-2k/K) radians a position (RoFormer, arXiv 2104.09864); ``RopeScaling`` gives the scaling.
    """
    exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float64, device=device) / config.head_dim
    frequencies = 1.0 / config.rope_theta**exponents
    scaling = config.rope_scaling
    if scaling is not None:
        turns = scaling.original_max_position * frequencies / (2 * math.pi)  # full turns within the original context
        blend = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = blend.clamp(0.0, 1.0)  # 0: stretched by `factor`, 1: left alone
        frequencies = frequencies * (blend + (1.0 - blend) / scaling.factor)
    return frequencies.float()


def rope_tables(config: LlamaConfig, positions: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of every position's angles, fp32, whatever the precision of the model.

    positions (S,) gives two tables (S, 1, K/2), positions (B, S) two of (B, S, 1, K/2).

    Made anew in each forward: there is no buffer that a meta device could leave empty, a precision could round to
    bf16 (8192 positions collapse to 897 values there) or a checkpoint could carry.
    """
    angles = positions.float()[..., None] * rope_frequencies(config, positions.device)  # (..., S, K/2)
    return angles.cos().unsqueeze(-2), angles.sin().unsqueeze(-2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pairs (k, k + K/2) of x (B, S, H, K) by their position's angle; fp32 inside, x's dtype outside.

    The half-split pairing of Hugging Face's weights, so that conversion renames tensors and permutes none.
    """
    a, b = x.float().chunk(2, dim=-1)  # (B, S, H, K/2)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def positions_in_documents(documents: Tensor) -> Tensor:
    """Positions (B, S) that start at 0 in each document.

    Args:
        documents: (B, S) int64, the number of the document that each token belongs to, never falling within a row.
    """
    index = torch.arange(documents.shape[1], device=documents.device).expand(documents.shape)
    begins = documents.diff(dim=1, prepend=documents[:, :1] - 1) != 0
    return index - torch.where(begins, index, 0).cummax(dim=1).values


def document_mask(documents: Tensor) -> Tensor | BlockMask:
    """What lets each token see itself and what stands before it in its own document, nothing else.

    On CPU a bool tensor (B, 1, S, S), on CUDA ``document_blocks``, for a kernel that skips what is masked.
    """
    if documents.is_cuda:
        return document_blocks(documents)
    return (documents[:, None, :, None] == documents[:, None, None, :]).tril()


def document_blocks(documents: Tensor) -> BlockMask:
    """The mask by blocks of 128 x 128 tokens, made without a look at each pair of tokens.

    A block of keys matters to a block of queries if it is not behind it and its last document is not before their
    first. If it also begins in their last document, every pair is of one document and needs no look either, but on
    the diagonal.
    """
    B, S = documents.shape
    blocks = -(-S // BLOCK)
    padded = F.pad(documents, (0, blocks * BLOCK - S), value=2**62).view(B, blocks, BLOCK)
    first, last = padded[..., 0], padded[..., -1]  # (B, blocks)
    place = torch.arange(blocks, device=documents.device)
    before = (place[:, None] > place)[None]  # (1, blocks of queries, blocks of keys)
    matters = (before | (place[:, None] == place)) & (last[:, None, :] >= first[:, :, None])
    whole = before & (first[:, None, :] == last[:, :, None])

    def listed(mask: Tensor) -> tuple[Tensor, Tensor]:
        """How many blocks of keys each block of queries has (B, 1, blocks), and which, those first."""
        order = mask.int().argsort(dim=-1, descending=True, stable=True)
        return mask.sum(-1, dtype=torch.int32)[:, None], order.int()[:, None]

    def visible(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q >= k) & (documents[b, q] == documents[b, k])

    return BlockMask.from_kv_blocks(
        *listed(matters & ~whole), *listed(whole), BLOCK_SIZE=BLOCK, mask_mod=visible, seq_lengths=(S, S)
    )


@lru_cache
def _flex_attention() -> Callable:
    return torch.compile(flex_attention, dynamic=False)  # uncompiled it makes the whole (S, S) matrix


def attend_within_documents(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | BlockMask) -> Tensor:
    """Attention of q (B, H, S, K) over k, v (B, G, S, K) where `mask` (of ``document_mask``) allows it."""
    grouped = q.shape[1] != k.shape[1]
    if isinstance(mask, BlockMask):
        return _flex_attention()(q, k, v, block_mask=mask, enable_gqa=grouped)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)


class LayerCache(NamedTuple):
    """Keys and values that a layer has computed, for generation: see ``llama.generate.Cache``."""

    k: Tensor  # (B, L, G, K), slot n holds position n
    v: Tensor
    positions: Tensor  # (B, S) int64: of the tokens in this call
    visible: Tensor | None  # (B, 1, 1, L) bool: slots that the one new token sees; None: a call from position 0 on


def attend_to_cache(q: Tensor, cache: LayerCache) -> Tensor:
    """Attention of one new token a row, q (B, H, 1, K), over the cached slots."""
    B, H, _, K = q.shape
    k, v = cache.k.transpose(1, 2), cache.v.transpose(1, 2)  # (B, G, L, K)
    # the heads that share a KV head stand as its queries: nothing is repeated
    y = F.scaled_dot_product_attention(q.reshape(B, k.shape[1], -1, K), k, v, attn_mask=cache.visible)
    return y.reshape(B, H, 1, K)


class Attention(nn.Module):
    """Causal grouped-query attention (arXiv 2305.13245) with rotary positions."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.wq = nn.Linear(config.dim, config.n_heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, config.n_kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(config.n_heads * config.head_dim, config.dim, bias=False)

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        B, S, _ = x.shape
        q = rotate(self.wq(x).view(B, S, -1, self.head_dim), cos, sin)  # (B, S, H, K); H is local under tp
        k = rotate(self.wk(x).view(B, S, -1, self.head_dim), cos, sin)  # (B, S, G, K)
        v = self.wv(x).view(B, S, -1, self.head_dim)  # (B, S, G, K)
        if cache is not None:
            rows = torch.arange(B, device=x.device)[:, None]
            cache.k.index_put_((rows, cache.positions), k)
            cache.v.index_put_((rows, cache.positions), v)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # (B, H or G, S, K)
        if cache is not None and cache.visible is not None:
            y = attend_to_cache(q, cache)
        elif mask is not None:
            y = attend_within_documents(q, k, v, mask)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        return self.wo(y.transpose(1, 2).reshape(B, S, -1))  # (B, S, D)


class FeedForward(nn.Module):
    """SwiGLU (arXiv 2002.05202): w2(silu(w1 x) * w3 x)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.w1 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # gate
        self.w2 = nn.Linear(config.ffn_dim, config.dim, bias=False)  # down
        self.w3 = nn.Linear(config.dim, config.ffn_dim, bias=False)  # up

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))  # (B, S, F) inside, (B, S, D) outside


class Block(nn.Module):
    """One decoder layer: x + attention(norm(x)), then x + feed_forward(norm(x))."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(config.dim, config.norm_eps)
        self.attention = Attention(config)
        self.ffn_norm = RMSNorm(config.dim, config.norm_eps)
        self.feed_forward = FeedForward(config)
        self.recompute = "none"  # "none", "selective" or "full": set by parallel.parallelize

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache | None = None,
        mask: Tensor | BlockMask | None = None,
    ) -> Tensor:
        # A call, not a wrapper module: no name in the state dict changes, and `block.compile()` sees what is inside.
        if self.recompute == "none" or not torch.is_grad_enabled():
            return self.layer(x, cos, sin, cache, mask)
        if self.recompute == "full":
            return checkpoint(self.layer, x, cos, sin, None, mask, use_reentrant=False)
        return checkpoint(self.layer, x, cos, sin, None, mask, use_reentrant=False, context_fn=selective_contexts)

    def layer(
        self, x: Tensor, cos: Tensor, sin: Tensor, cache: LayerCache | None, mask: Tensor | BlockMask | None
    ) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin, cache=cache, mask=mask)  # (B, S, D); (B, S/t, D) on tp
        return x + self.feed_forward(self.ffn_norm(x))


def _keep_or_recompute(seen: dict[bool, int], ctx, op, *args, **kwargs) -> CheckpointPolicy:
    name = str(op)
    if any(kept in name for kept in ("scaled_dot_product", "flex_attention", "reduce_scatter")):
        return CheckpointPolicy.MUST_SAVE
    if op is torch.ops.aten.mm.default:
        seen[ctx.is_recompute] += 1
        if seen[ctx.is_recompute] % 2:
            return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts():
    """Selective recompute: keep attention's and the reduce-scatters' results and those of every second matrix product.

    These are the results that cost most to make again for the memory they take; all else is made again in backward.
    """
    return create_selective_checkpoint_contexts(partial(_keep_or_recompute, {False: 0, True: 0}))


class TiedOutput(nn.Module):
    """The output projection of a tied model: it owns no weight, so that there is one parameter under every mesh."""

    def forward(self, x: Tensor, embedding: Tensor) -> Tensor:
        return F.linear(x, embedding)


class Llama(nn.Module):
    """A Llama 3 decoder: tokens (B, S) int64 -> logits (B, S, V).

    Built on a real device its weights are drawn by ``init_weights`` with seed 0; built under ``torch.device("meta")``
    it holds no memory, and whoever materialises it calls ``init_weights`` or loads a checkpoint.
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.tok_embeddings = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(Block(config) for _ in range(config.n_layers))
        self.norm = RMSNorm(config.dim, config.norm_eps)
        self.output = TiedOutput() if config.tied_embeddings else nn.Linear(config.dim, config.vocab_size, bias=False)
        if not self.tok_embeddings.weight.is_meta:
            init_weights(self, seed=0)

    def forward(
        self,
        tokens: Tensor,
        documents: Tensor | None = None,
        cache: Sequence[LayerCache] | None = None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """Logits (B, S, V) of tokens (B, S).

        Args:
            documents: (B, S) int64, the number of the document that each token belongs to, never falling within a row:
                attention stays inside a document and positions start anew in each. Without: each row is one.
            cache: for generation, one a layer; their positions are the tokens'. Without: positions 0 to S - 1.
            wanted: (B,) int64, for generation: the one index of each row whose logits are computed, giving (B, 1, V).
        """
        mask = None
        if documents is not None:
            positions, mask = positions_in_documents(documents), document_mask(documents)  # (B, S)
        elif cache is not None:
            positions = cache[0].positions  # (B, S)
        else:
            positions = torch.arange(tokens.shape[1], device=tokens.device)  # (S,)
        cos, sin = rope_tables(self.config, positions)
        x = self.tok_embeddings(tokens)  # (B, S, D), or (B, S/t, D) under sequence parallelism
        for i, layer in enumerate(self.layers):
            x = layer(x, cos, sin, cache=cache[i] if cache is not None else None, mask=mask)
        if wanted is not None:
            x = x[torch.arange(len(x), device=x.device), wanted][:, None]  # (B, 1, D)
        x = self.norm(x)
        if self.config.tied_embeddings:
            return self.output(x, self.tok_embeddings.weight)  # (B, S, V)
        return self.output(x)


@torch.no_grad()
def init_weights(
    model: Llama, seed: int, write: Callable[[Tensor, Tensor], object] = lambda parameter, full: parameter.copy_(full)
) -> None:
    """Draw every weight of the model: the one place where weights get their first values.

    The specification (the depth-scaled scheme of torchtitan's Llama 3, ``torchtitan/models/llama3/__init__.py``;
    l counts layers from 0, all means are 0):

    ==============================================  ====================================================
    norms' weights                                  1
    token embedding, untied                         normal, std 1
    wq, wk, wv, w1                                  normal, std 0.02
    wo, w2, w3 of layer l                           normal, std 0.02 / sqrt(2 (l + 1))
    output projection; embedding of a tied model    normal, std D^-1/2, cut at +-3 std (std 0.9866 D^-1/2)
    ==============================================  ====================================================

    With these the logits have a variance of 0.973 or so, and the first loss is near ln(V) + 0.49.

    Each parameter is drawn whole, in fp32 on its own device, from a generator seeded by (seed, name), then handed to
    ``write(parameter, full)``, which stores the part that this process holds. So the values depend neither on the mesh
    nor on the number of layers drawn before, and the extra memory is one full parameter. CPU and CUDA generators
    differ: the values are equal on every mesh of one kind of device, not across kinds.
    """
    for name, parameter in model.named_parameters():
        std, cut = _initial_std(name, model.config)
        full = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest[:7], "little"))
        if std == 0.0:
            full.fill_(1.0)
        elif cut is None:
            full.normal_(0.0, std, generator=generator)
        else:  # inverse CDF in place: torch.nn.init.trunc_normal_ takes several copies of the parameter
            edge = math.erf(cut / math.sqrt(2.0))
            full.uniform_(-edge, edge, generator=generator).erfinv_().mul_(std * math.sqrt(2.0))
            full.clamp_(-cut * std, cut * std)
        write(parameter, full)


def _initial_std(name: str, config: LlamaConfig) -> tuple[float, float | None]:
    """(standard deviation, cut in standard deviations) of the parameter's first values; std 0 stands for all ones."""
    parts = name.split(".")
    if "norm" in parts[-2]:
        return 0.0, None
    if parts[0] == "output" or (parts[0] == "tok_embeddings" and config.tied_embeddings):
        return config.dim**-0.5, 3.0
    if parts[0] == "tok_embeddings":
        return 1.0, None
    if parts[-2] in ("wo", "w2", "w3"):
        return 0.02 / math.sqrt(2 * (int(parts[1]) + 1)), None
    return 0.02, None
