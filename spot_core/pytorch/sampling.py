"""One global order of the data, cut for the ranks: a place in it means the same for any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sized
from typing import Any

import torch
from torch.utils.data.distributed import DistributedSampler

from spot_core.pytorch.streams import mix


class GlobalSampler(DistributedSampler[Any]):
    """Rank r of w takes positions r, r + w, r + 2w, ... of one order, a function of (seed, epoch).

    Without `drop_last` the order is padded from its beginning to a multiple of w, as DistributedSampler does; with it
    the rest is left out. `seek(offset)` starts the next pass at a global position instead of 0, whatever number of
    ranks or batch size led there. A DistributedSampler by type, so that trainers leave it in place.
    """

    def __init__(
        self,
        data: Sized,
        *,
        num_replicas: int = 1,
        rank: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
    ) -> None:
        super().__init__(data, num_replicas, rank, shuffle, seed, drop_last)  # type: ignore[arg-type]
        self._offset = 0

    def seek(self, offset: int) -> None:
        """`offset`: samples of this epoch that all ranks together have passed."""
        if offset < 0:
            raise ValueError(f"an offset into the data is not negative, this one is {offset}")
        self._offset = offset

    def __iter__(self) -> Iterator[Any]:
        offset, self._offset = self._offset, 0
        order = self._order()[offset:]
        extra = -len(order) % self.num_replicas
        if self.drop_last:
            order = order[: len(order) // self.num_replicas * self.num_replicas]
        elif extra:
            first = self._order()
            order += (first * -(-extra // len(first)))[:extra]
        return iter(order[self.rank :: self.num_replicas])

    def _order(self) -> list[int]:
        count = len(self.dataset)  # type: ignore[arg-type]
        if not self.shuffle:
            return list(range(count))
        generator = torch.Generator().manual_seed(mix(self.seed, self.epoch))
        return torch.randperm(count, generator=generator).tolist()
