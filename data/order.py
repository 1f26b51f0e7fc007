"""In which order the windows of a text are trained on: a pure function of (seed, global sample index).

Nothing is shuffled in memory and nothing has to be saved: the whole state of the data is the number of samples that
were trained on, and neither the mesh, the micro-batch, nor the number of workers enters.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from torch.utils.data import Dataset

_MASK64 = (1 << 64) - 1
_ROUNDS = 6


def window_of(sample: int, windows: int, seed: int) -> int:
    """The window that global sample index `sample` trains on.

    Every epoch of ``windows`` samples visits each window once, in its own order: a Feistel network keyed by
    (seed, epoch) permutes the smallest even number of bits that holds all windows, and cycle walking skips the
    values beyond them (Black and Rogaway 2002, "Ciphers with arbitrary finite domains"). O(1) time and memory.

    Raises:
        ValueError: if there is no window, or the sample index is negative.
    """
    if windows < 1 or sample < 0:
        raise ValueError(f"sample {sample} of {windows} windows: there is none")
    epoch, position = divmod(sample, windows)
    half = max(1, ((windows - 1).bit_length() + 1) // 2)  # bits in each half of the network
    mask = (1 << half) - 1
    key = _mix(_mix(seed & _MASK64) ^ epoch)
    value = position
    while True:  # 4 walks at the very most on average: the domain is less than 4 x windows
        left, right = value >> half, value & mask
        for r in range(_ROUNDS):
            left, right = right, left ^ (_mix(key ^ (r << 56) ^ right) & mask)
        value = left << half | right
        if value < windows:
            return value


def _mix(x: int) -> int:
    """A 64-bit mixing function: the finaliser of SplitMix64 (Steele, Lea, Flood 2014)."""
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


class Shuffled(Dataset):
    """A dataset indexed by global sample: item n is window ``window_of(n)`` of the dataset inside, for any n >= 0."""

    def __init__(self, dataset: Dataset, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor]:
        return self.dataset[window_of(sample, len(self.dataset), self.seed)]


class RankBatches:
    """The global sample indices of each micro-batch of one data-parallel rank: a batch sampler without an end.

    Step n trains on samples n * global_batch ... (n + 1) * global_batch - 1; each data-parallel rank takes a contiguous
    share of them, so shares are disjoint, and the ranks of one tensor-parallel group (the same `rank`) get equal ones.
    """

    def __init__(self, start: int, global_batch: int, micro_batch: int, rank: int, ranks: int) -> None:
        self.start = start  # samples already trained on
        self.global_batch = global_batch
        self.micro_batch = micro_batch
        self.rank = rank
        self.ranks = ranks

    def __iter__(self) -> Iterator[list[int]]:
        share = self.global_batch // self.ranks
        first = self.start + self.rank * share
        while True:
            for micro in range(first, first + share, self.micro_batch):
                yield list(range(micro, micro + self.micro_batch))
            first += self.global_batch
