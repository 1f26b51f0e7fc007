"""Text out: ids drawn one after the other from a model's logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def sample_ids(
    logits_of: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    *,
    new_tokens: int,
    context: int,
    vocab_size: int,
    temperature: float = 0.8,
    seed: int = 0,
    device: torch.device | None = None,
) -> list[int]:
    """Draw ``new_tokens`` ids that go on from a prompt; the same ids on every rank that sees the same logits.

    The model always sees one row of ``context`` ids, the latest ones first and zeros behind them: a fixed shape, which
    sequence parallelism can cut and compiled code has seen; attention is causal, so what stands behind changes nothing.

    Args:
        logits_of: tokens (1, context) int64 -> logits (1, context, V), whole on every rank.
        prompt: at least one id.
        new_tokens: fewer are drawn where the logits are not finite.
        vocab_size: ids at or above it are never drawn (a model's vocabulary is often padded beyond its tokenizer's).
        temperature: divides the logits; 0 takes the likeliest id.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)  # on the host, so that every kind of device draws alike
    for _ in range(new_tokens):
        seen = ids[-context:]
        row = torch.zeros(1, context, dtype=torch.int64)
        row[0, : len(seen)] = torch.tensor(seen)
        logits = logits_of(row.to(device))[0, len(seen) - 1, :vocab_size].float().cpu()
        if not logits.isfinite().all():
            break  # a model that has diverged has nothing to say; every rank sees the same logits
        if temperature == 0.0:
            ids.append(int(logits.argmax()))
        else:
            probabilities = (logits / temperature).softmax(0)
            ids.append(int(torch.multinomial(probabilities, 1, generator=generator)))
    return ids[len(prompt) :]
