"""The global batches of one number of ranks, dealt to another: the same samples per step, the same gradient.

`origin` ranks with `batch` samples each go through the order of a pass in blocks of origin * batch samples, one block
per forward and backward of all ranks; rank r of them takes every origin-th sample of a block. Any other number of ranks
shares the samples of each block in the same way, in as many micro-batches as its ranks need to hold no more than their
own batch size at a time (`splits`). A run that goes on with these gets each block's gradient by accumulating over the
micro-batches, each weighted by its number of samples (`weights`): a mean of means would be another gradient when the
block does not divide evenly.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass

from spot_core.errors import TopologyError

__all__ = ["Deal", "Hand", "origin_of"]

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Hand:
    """One micro-batch of one rank: places in the order of the pass."""

    places: range
    weight: float
    """Factor for the mean loss of the micro-batch, so that the mean over all micro-batches of all ranks is the mean
    over the block's samples. 0 for a micro-batch that repeats a sample because the block has too few."""
    block: int
    """Where the block begins in the order, in samples."""
    part: int
    """Which of the block's micro-batches."""


@dataclass(frozen=True)
class Deal:
    """Blocks of `origin` ranks with `batch` samples each."""

    origin: int
    batch: int

    @property
    def block(self) -> int:
        return self.origin * self.batch

    def splits(self, world: int, batch: int) -> int:
        """Micro-batches per block for `world` ranks that take at most `batch` samples at a time."""
        return -(-self.block // (world * batch))

    def end(self, count: int, offset: int, *, truncate: bool, drop_last: bool) -> int:
        """Where the last block ends, in an order of `count` samples whose first `offset` were seen.

        What does not fill all ranks of `origin` is left out (`truncate`), or filled up from the order's beginning, as
        DistributedSampler does; with `drop_last` an incomplete block is left out.
        """
        left = max(count - offset, 0)
        left = left - left % self.origin if truncate else left + -left % self.origin
        return offset + (left - left % self.block if drop_last else left)

    def blocks(self, begin: int, end: int) -> int:
        return -(-max(end - begin, 0) // self.block)

    def hands(self, begin: int, end: int, *, rank: int, world: int, batch: int) -> Iterator[Hand]:
        """The micro-batches of `rank`, block by block; every rank gets as many."""
        splits = self.splits(world, batch)
        for block in range(begin, end, self.block):
            yield from self._block(block, min(block + self.block, end), rank, world, splits)

    def _block(self, begin: int, end: int, rank: int, world: int, splits: int) -> Iterator[Hand]:
        size = end - begin
        mine = range(begin + rank, end, world)
        base, more = divmod(len(mine), splits)
        at = 0
        for part in range(splits):
            count = base + (part < more)
            places = mine[at : at + count]
            at += count
            if not places:
                places = range(begin + rank % size, begin + rank % size + 1)
            yield Hand(places, count * splits * world / size, begin, part)


def origin_of(on_resize: str, *, saved: int, world: int, origin: int, speaks: bool = True) -> int:
    """The number of ranks whose global batch this life takes: `origin`, the one so far, or the present `world`.

    `saved`: ranks that saved what is resumed. The log says what was chosen, if this rank `speaks`.
    Raises TopologyError when the number of ranks changed and `on_resize` is "refuse".
    """
    if world == saved:
        return origin
    if on_resize == "refuse":
        raise TopologyError(
            f"The run was saved by {saved} ranks and is resumed by {world}, and on_resize is 'refuse'.",
            hint=f"Start {saved} ranks, or set on_resize (SPOT_ON_RESIZE) to 'keep_global_batch' or 'accept'.",
        )
    origin = world if on_resize == "accept" else origin
    if speaks:
        log.warning(
            "spot: saved by %d ranks, resumed by %d: the global batch is that of %d ranks (on_resize=%r)",
            saved, world, origin, on_resize,
        )
    return origin
