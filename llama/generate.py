"""Text out: ids drawn one after the other from a model's logits."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from torch import Tensor

from llama.model import LayerCache, Llama


def choose(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> Tensor:
    """Draw one id a row: logits (B, V) of any float type -> ids (B,) int64; -1 where a row's logits are not finite.

    Args:
        temperature: divides the logits; 0 takes the likeliest id.
        top_k: only the k likeliest ids; 0: all.
        top_p: only the likeliest ids that together have this probability, at least one (nucleus sampling,
            arXiv 1904.09751); applied after temperature and top_k.
        generator: of the logits' device.
    """
    finite = logits.isfinite().all(-1)
    logits = logits.float().nan_to_num()
    if temperature < 1e-5:  # the likeliest id has all the probability, and dividing would overflow
        return torch.where(finite, logits.argmax(-1), -1)
    logits = logits / temperature
    if 0 < top_k < logits.shape[-1]:
        smallest = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < smallest, -torch.inf)
    probabilities = logits.softmax(-1)
    if top_p < 1:
        probabilities, order = probabilities.sort(descending=True)
        likelier = probabilities.cumsum(-1) - probabilities  # what stands before each id
        beyond = likelier >= top_p
        beyond[:, 0] = False
        probabilities = probabilities.masked_fill(beyond, 0.0)
        drawn = order.gather(-1, torch.multinomial(probabilities, 1, generator=generator))[:, 0]
    else:
        drawn = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return torch.where(finite, drawn, -1)


class Cache:
    """Keys and values of every layer for up to `length` positions of `rows` sequences.

    Slot n of a row holds position n, so rows may be of different lengths: what a shorter prompt's padding wrote lies in
    slots that are not visible, and is overwritten as the row grows.
    """

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        weight = model.layers[0].attention.wk.weight
        shape = (rows, length, model.config.n_kv_heads, model.config.head_dim)
        self.layers = [(weight.new_zeros(shape), weight.new_zeros(shape)) for _ in model.layers]
        self.slots = torch.arange(length, device=weight.device)

    def at(self, positions: Tensor, visible: Tensor | None) -> list[LayerCache]:
        """What ``Llama.forward`` takes for tokens at these positions."""
        return [LayerCache(k, v, positions, visible) for k, v in self.layers]


class Decoder:
    """A model that is given one token a row at a time, after a first call with the prompts.

    On a GPU a step is some hundreds of small kernels, whose launching takes longer than their work: it is captured
    once as a CUDA graph and replayed.
    """

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        self.model = model
        self.cache = Cache(model, rows, length)
        self.device = self.cache.slots.device
        self.tokens = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.positions = torch.zeros(rows, 1, dtype=torch.int64, device=self.device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.logits: Tensor | None = None

    def read_prompts(self, tokens: Tensor, lengths: Tensor) -> Tensor:
        """Prompts (B, S), padded behind to equal length, and their lengths (B,) -> logits (B, V) after the last id."""
        positions = torch.arange(tokens.shape[1], device=self.device).expand(tokens.shape)
        with torch.compiler.set_stance("force_eager"):  # a shape that is seen once is not worth compiling for
            return self.model(tokens, cache=self.cache.at(positions, None), wanted=lengths - 1)[:, 0]

    def step(self, tokens: Tensor, positions: Tensor) -> Tensor:
        """One id a row (B,) at its position (B,) -> logits (B, V)."""
        self.tokens.copy_(tokens[:, None])
        self.positions.copy_(positions[:, None])
        if self.device.type != "cuda":
            return self._forward()
        if self.graph is None:
            self._capture()
        self.graph.replay()
        return self.logits

    def _forward(self) -> Tensor:
        visible = (self.cache.slots <= self.positions)[:, None, None]  # (B, 1, 1, L)
        return self.model(self.tokens, cache=self.cache.at(self.positions, visible))[:, 0]

    def _capture(self) -> None:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries set themselves up in the first calls; the slots are written again
            for _ in range(2):
                self._forward()
        torch.cuda.current_stream().wait_stream(stream)
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            self.logits = self._forward()


@torch.inference_mode()
def generate(
    model: Llama,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop_ids: Collection[int] = (),
    vocab_size: int | None = None,
) -> Iterator[list[int | None]]:
    """Go on from several prompts in one batch, with a cache of keys and values.

    Args:
        model: unsharded, on one device.
        prompts: ids, at least one each; lengths may differ.
        temperature, top_k, top_p: see ``choose``.
        stop_ids: a row ends before one of them.
        vocab_size: ids at or above it are never drawn (a model's vocabulary may be padded beyond its tokenizer's).

    Yields:
        The new id of each row, None for rows that have ended; nothing more once all have.

    Raises:
        ValueError: a prompt is empty or holds an id outside the vocabulary, or the model's logits are not finite.
    """
    device = model.tok_embeddings.weight.device
    if not prompts:
        raise ValueError("there is no prompt to go on from")
    for prompt in prompts:
        if not prompt:
            raise ValueError("a prompt has no token; a model needs at least one to go on from")
        if not all(0 <= i < model.config.vocab_size for i in prompt):
            raise ValueError(f"a prompt holds an id outside the model's vocabulary of {model.config.vocab_size:,}")
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    longest = int(lengths.max())
    rows = torch.zeros(len(prompts), longest, dtype=torch.int64)
    for row, prompt in zip(rows, prompts, strict=True):
        row[: len(prompt)] = torch.tensor(prompt)
    generator = torch.Generator(device).manual_seed(seed)
    # attention's kernels read masks in multiples of 8
    decoder = Decoder(model, len(prompts), -(-(longest + max_new_tokens) // 8) * 8)
    positions = lengths.to(device)  # of the next token of each row
    running = [True] * len(prompts)
    logits = decoder.read_prompts(rows.to(device), positions)
    for n in range(max_new_tokens):
        ids = choose(logits[:, :vocab_size], temperature, top_k, top_p, generator)
        drawn = HostCopy(ids)
        if n + 1 < max_new_tokens:  # a GPU begins its next step before the host looks at this one's ids
            logits = decoder.step(ids.clamp(min=0), positions)
            positions = positions + 1
        step = drawn.wait()
        if -1 in step:
            raise ValueError("the model's logits are not finite; its weights are damaged, or training had diverged")
        running = [on and i not in stop_ids for on, i in zip(running, step, strict=True)]
        if not any(running):
            return
        yield [i if on else None for on, i in zip(running, step, strict=True)]


class HostCopy:
    """A copy on the host that is waited for alone, not together with what the device was given to do after it."""

    def __init__(self, tensor: Tensor) -> None:
        self.copied = torch.cuda.Event() if tensor.is_cuda else None
        self.host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
        self.host.copy_(tensor, non_blocking=True)
        if self.copied is not None:
            self.copied.record()

    def wait(self) -> list | int | float:
        """The values, once they have arrived; a number for a tensor without axes."""
        if self.copied is not None:
            self.copied.synchronize()
        return self.host.tolist()


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
    """Draw ``new_tokens`` ids with a model that is sharded over a mesh; the same ids on every rank.

    The model always sees one row of ``context`` ids, the latest ones first and zeros behind them: a fixed shape, which
    sequence parallelism can cut; attention is causal, so what stands behind changes nothing.

    Args:
        logits_of: tokens (1, context) int64 -> logits (1, context, V), whole on every rank.
        prompt: at least one id.
        new_tokens: fewer are drawn where the logits are not finite.
        vocab_size: as in ``generate``.
        temperature: see ``choose``.
    """
    ids = list(prompt)
    generator = torch.Generator().manual_seed(seed)  # on the host, so that every kind of device draws alike
    for _ in range(new_tokens):
        seen = ids[-context:]
        row = torch.zeros(1, context, dtype=torch.int64)
        row[0, : len(seen)] = torch.tensor(seen)
        logits = logits_of(row.to(device))[:, len(seen) - 1, :vocab_size].float().cpu()
        drawn = int(choose(logits, temperature, 0, 1.0, generator))
        if drawn < 0:
            break  # a model that has diverged has nothing to say; every rank sees the same logits
        ids.append(drawn)
    return ids[len(prompt) :]
