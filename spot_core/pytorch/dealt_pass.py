"""One pass over the data in the blocks of a `Deal`: after a change of the number of ranks or of the batch size."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch.utils.data import BatchSampler, DataLoader

from spot_core.pytorch.deal import Deal, Hand
from spot_core.pytorch.order import Order

__all__ = ["DealtPass", "batch_size_of", "drops_last"]


def batch_size_of(loader: DataLoader[Any]) -> int | None:
    """Samples per batch; None when the loader's batch sampler decides for itself. 1 for a loader that makes none."""
    if loader.batch_sampler is None:
        return 1
    return loader.batch_sampler.batch_size if type(loader.batch_sampler) is BatchSampler else None


def drops_last(loader: DataLoader[Any]) -> bool:
    return bool(getattr(loader.batch_sampler, "drop_last", False))


class DealtPass:
    """Has the same verbs as `OnePass`. Begins in front of part `part` of the block at `offset`."""

    dealt = True

    def __init__(
        self,
        loader: DataLoader[Any],
        deal: Deal,
        order: Callable[[], Order],
        *,
        rank: int,
        world_size: int,
        offset: int = 0,
        part: int = 0,
    ) -> None:
        batch = batch_size_of(loader)
        assert batch is not None, "a loader whose batches are not known cannot be dealt"
        self._loader, self._deal, self._make = loader, deal, order
        self._batch, self._rank, self._world = batch, rank, world_size
        self._order: Order | None = None
        self._at = (offset, part)
        self._given: deque[tuple[Hand, tuple[int, int]]] = deque()
        self.weight = 1.0
        self.memory: dict[str, Any] = {}

    @property
    def order(self) -> Order:
        if self._order is None:
            self._order = self._make()
        return self._order

    def follow(self, order: Order) -> None:
        """Follow an order that was saved, instead of asking for one."""
        self._make = lambda: order

    def remember(self) -> None:
        """Nothing of the loader's is needed: the order is in the place."""

    def indices(self) -> Iterator[tuple[int, Any]]:
        """(number of the batch, index or indices) from the place on."""
        self._order = None  # a DistributedSampler is told its epoch after workers-less loaders were opened
        order, (offset, part) = self.order, self._at
        indices, splits = order.indices(), self._deal.splits(self._world, self._batch)
        end = self._end(offset)
        for hand in self._deal.hands(offset, end, rank=self._rank, world=self._world, batch=self._batch):
            if hand.block == offset and hand.part < part:
                continue
            last = hand.part == splits - 1
            after = (min(hand.block + self._deal.block, end), 0) if last else (hand.block, hand.part + 1)
            self._given.append((hand, after))
            request = [int(indices[place % order.count]) for place in hand.places]
            number = hand.block * splits + hand.part
            yield number, request[0] if self._loader.batch_sampler is None else request

    def consumed(self) -> None:
        hand, self._at = self._given.popleft()
        self.weight = hand.weight

    def left(self) -> int:
        """Batches from here to the end of the pass."""
        offset, part = self._at
        return self._deal.blocks(offset, self._end(offset)) * self._deal.splits(self._world, self._batch) - part

    def whole(self) -> int:
        """Batches of a pass from its beginning."""
        return self._deal.blocks(0, self._end(0)) * self._deal.splits(self._world, self._batch)

    def _end(self, offset: int) -> int:
        drop_last = drops_last(self._loader)
        return self._deal.end(self.order.count, offset, truncate=self.order.truncate, drop_last=drop_last)

    def place(self) -> dict[str, Any]:
        offset, part = self._at
        return {
            "batches": self.whole() - self.left(),
            "samples": offset // self._world,
            "offset": offset,
            "part": part,
            "batches_in_pass": self.whole(),
            "order": self.order.to_state(),
        }
