"""In which order the windows of a text are trained on: a pure function of (seed, global sample index).

Nothing is shuffled in memory and nothing has to be saved: the whole state of the data is the number of samples that
were trained on, and neither the mesh, the micro-batch, nor the number of workers enters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # its import takes seconds, which tokenizing text need not wait for
    from torch import Tensor

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


PERIOD = 1000  # samples after which a mixture's pattern of sources repeats


@dataclass(frozen=True)
class Era:
    """From which global sample on which weights hold: source name -> weight."""

    start: int
    weights: dict[str, float]
    fresh: bool = False  # every source begins anew: its text, its windows or the seed are others than before


class Mixture:
    """Which source each global sample comes from, and which of that source's samples it is: a pure function.

    The pattern repeats every `PERIOD` samples, in which each source has its weight's share, rounded to a whole number
    by largest remainders; so in *any* `PERIOD` consecutive samples each source has that same number. Within a period
    the sources are spread evenly (each sample goes to the source that is furthest behind its share).

    Args:
        eras: one, or more where the weights were changed during a run, oldest first; the first starts at 0, a later
            one at a sample that is not before its predecessor's.

    Raises:
        ValueError: weights that are no positive finite numbers, or so small that a source would have no sample.
    """

    def __init__(self, eras: Sequence[Era]) -> None:
        self.eras = list(eras)
        self.patterns = [_pattern(era.weights) for era in self.eras]
        # samples of each source before each era
        self.before: list[dict[str, int]] = [{}]
        for i in range(1, len(self.eras)):
            length = self.eras[i].start - self.eras[i - 1].start
            counts = dict(self.before[-1])
            for name in self.eras[i - 1].weights:
                counts[name] = counts.get(name, 0) + self.patterns[i - 1].count(name, length)
            self.before.append({} if self.eras[i].fresh else counts)

    def place(self, sample: int) -> tuple[str, int]:
        """(source, how many samples of it came before)."""
        era = max(i for i, era in enumerate(self.eras) if era.start <= sample)
        pattern, offset = self.patterns[era], sample - self.eras[era].start
        name = pattern.names[pattern.order[offset % PERIOD]]
        return name, self.before[era].get(name, 0) + pattern.count(name, offset)


@dataclass(frozen=True)
class _Pattern:
    names: list[str]
    order: list[int]  # source of each place in a period
    counted: dict[str, list[int]]  # samples of a source in the first n places, n = 0 ... PERIOD

    def count(self, name: str, samples: int) -> int:
        """Samples of a source among the first `samples`."""
        periods, rest = divmod(samples, PERIOD)
        counted = self.counted[name]
        return periods * counted[PERIOD] + counted[rest]


def _pattern(weights: dict[str, float]) -> _Pattern:
    total = sum(weights.values())
    if not weights or not all(0 < weight < math.inf for weight in weights.values()) or not 0 < total < math.inf:
        raise ValueError(f"a mixture's weights must be numbers above 0; they are {weights}")
    exact = {name: PERIOD * weight / total for name, weight in weights.items()}
    share = {name: int(value) for name, value in exact.items()}
    for name in sorted(exact, key=lambda n: (share[n] - exact[n], n))[: PERIOD - sum(share.values())]:
        share[name] += 1
    if not all(share.values()):
        small = min(exact, key=exact.get)
        raise ValueError(
            f"source {small} has a weight of {weights[small]} of {total}, less than one sample in {PERIOD}; leave it "
            "out or give it more"
        )
    names, order = list(weights), []
    counted = {name: [0] for name in names}
    for place in range(1, PERIOD + 1):
        behind = [share[name] * place / PERIOD - counted[name][-1] for name in names]
        chosen = behind.index(max(behind))
        order.append(chosen)
        for i, name in enumerate(names):
            counted[name].append(counted[name][-1] + (i == chosen))
    return _Pattern(names, order, counted)


class Shuffled:
    """Datasets indexed by global sample: item n, for any n >= 0, is (inputs, labels, source).

    Args:
        datasets: source name -> windows; (inputs, labels), each (S,) int64.
        mixture: of these sources.
        seed: of the order within each source.
        begin_id, end_id: what parts documents, for ``documents``; both None: they are not told apart.
    """

    def __init__(
        self,
        datasets: Mapping[str, Any],
        mixture: Mixture,
        seed: int,
        begin_id: int | None = None,
        end_id: int | None = None,
    ) -> None:
        self.datasets = dict(datasets)
        self.names = list(self.datasets)
        self.mixture = mixture
        self.seed = seed
        self.begin_id = begin_id
        self.end_id = end_id

    def documents(self, inputs: Tensor) -> Tensor | None:
        """The number of the document that each token of inputs (B, S) belongs to, (B, S) int64; None: not told apart.

        A document begins at each begin id; with an end id alone, behind each of these.
        """
        if self.begin_id is not None:
            return (inputs == self.begin_id).cumsum(1)
        if self.end_id is not None:
            ends = (inputs == self.end_id).long()
            return ends.cumsum(1) - ends
        return None

    def __getitem__(self, sample: int) -> tuple[Tensor, Tensor, int]:
        name, index = self.mixture.place(sample)
        dataset = self.datasets[name]
        inputs, labels = dataset[window_of(index, len(dataset), self.seed)]
        return inputs, labels, self.names.index(name)


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
