"""The order of one pass over the data as a value: it can be stored, and gives the same order to any number of ranks.

A sampler is made for one number of ranks, and a trainer exchanges it when there are more (RandomSampler becomes
DistributedSampler). What was saved is therefore the order itself, in a few numbers: the rest of the pass, and the
passes after it, follow it whatever sampler stands in the loader now.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from spot_core.pytorch.sampling import GlobalSampler
from spot_core.pytorch.streams import mix

__all__ = ["Order"]

_SHUFFLED = ("random", "generator")


@dataclass(frozen=True)
class Order:
    """Order of `count` samples.

    kind: "sequential"; "random", torch's RandomSampler under a stream of its own that begins at `seed`; "generator", a
        RandomSampler that draws from the user's generator, which was in `state`; "distributed" and "global",
        torch's DistributedSampler and `GlobalSampler`, functions of (seed, epoch).
    truncate: what does not fill all ranks is left out; otherwise the order is padded from its beginning.
    """

    kind: str
    count: int
    shuffle: bool
    seed: int = 0
    epoch: int = 0
    state: Tensor | None = None
    truncate: bool = False

    @classmethod
    def of(cls, loader: DataLoader[Any], *, seed: int) -> Order | None:
        """The order of the pass that the loader is about to make; None when it cannot be told from outside.

        `seed`: of the private stream that a sampler without a generator draws from in this pass.
        """
        batches = loader.batch_sampler
        if batches is not None and type(batches) is not BatchSampler:
            return None
        sampler = loader.sampler if batches is None else batches.sampler
        read = _READERS.get(type(sampler))
        found: Order | None = None if read is None else read(sampler, seed)
        return found

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Order:
        return cls(**state)

    def to_state(self) -> dict[str, Any]:
        return {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}

    def stands_for(self, other: Order) -> bool:
        """Whether both go through the same samples in the way the user asked for: in order, or shuffled."""
        return (self.count, self.shuffle) == (other.count, other.shuffle)

    def same(self, other: Order) -> bool:
        """Whether every pass of both is the same; a generator's state is restored, so it does not count."""
        mine, theirs = (dataclasses.replace(order, epoch=0, state=None) for order in (self, other))
        if self.kind == other.kind and self.kind in _SHUFFLED:
            return mine.count == theirs.count  # their seeds are the view's, which is restored
        return mine == theirs

    def next(self) -> Order:
        """The order of the pass after it, as far as it says; the seed of a stream is for the caller to give."""
        if self.kind == "generator":
            return dataclasses.replace(self, kind="random", state=None)
        return dataclasses.replace(self, epoch=self.epoch + 1)

    def seeded(self, seed: int) -> Order:
        """The same for a pass whose private stream begins at `seed`."""
        return dataclasses.replace(self, seed=seed) if self.kind == "random" else self

    def indices(self) -> Tensor:
        """All of them, int64, as a trainer of one rank would come by them."""
        if not self.shuffle:
            return torch.arange(self.count)
        return torch.randperm(self.count, generator=self._generator())

    def _generator(self) -> torch.Generator:
        generator = torch.Generator()
        if self.kind == "generator":
            assert self.state is not None
            generator.set_state(self.state)
            return generator
        if self.kind == "random":  # RandomSampler draws a seed from the stream, and the order from that seed
            stream = torch.Generator().manual_seed(self.seed)
            return generator.manual_seed(int(torch.empty((), dtype=torch.int64).random_(generator=stream).item()))
        seed = self.seed + self.epoch if self.kind == "distributed" else mix(self.seed, self.epoch)
        return generator.manual_seed(seed)


def _sequential(sampler: SequentialSampler, seed: int) -> Order | None:
    return Order("sequential", len(sampler.data_source), shuffle=False)


def _random(sampler: RandomSampler, seed: int) -> Order | None:
    count = len(sampler.data_source)
    if sampler.replacement or sampler.num_samples != count:
        return None
    if sampler.generator is None:
        return Order("random", count, shuffle=True, seed=seed)
    return Order("generator", count, shuffle=True, state=sampler.generator.get_state())


def _distributed(sampler: DistributedSampler[Any], seed: int) -> Order | None:
    kind = "global" if isinstance(sampler, GlobalSampler) else "distributed"
    if not isinstance(sampler.dataset, Sized):
        return None
    return Order(
        kind,
        len(sampler.dataset),
        shuffle=sampler.shuffle,
        seed=sampler.seed if sampler.shuffle else 0,
        epoch=sampler.epoch if sampler.shuffle else 0,
        truncate=sampler.drop_last,
    )


_READERS: dict[type, Callable[[Any, int], Order | None]] = {
    SequentialSampler: _sequential,
    RandomSampler: _random,
    DistributedSampler: _distributed,
    GlobalSampler: _distributed,
}
"""Exact types: a subclass may iterate in a way of its own."""
