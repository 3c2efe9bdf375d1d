"""A training that goes on with another number of processes: the same samples in each update, by gradient accumulation.

accelerate deals the batches of one order, f(seed, epoch), to the processes in turn. An update takes `processes *
accumulation` of them; as long as that product stays, the number of updates is a place in the order for any number of
processes, and the learning rate, a function of updates, is the same. What differs: random draws (each process is seeded
anew), and how many samples fill up the last update of an epoch.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from accelerate_spot.trainer import _compat
from spot_core.errors import TopologyError

log = logging.getLogger(__name__)


def accumulation(saved: Mapping[str, int], *, saved_world: int, args: Any, on_resize: str) -> int:
    """The accumulation that keeps the global batch of the run; `saved`: ``given`` by the arguments then, and ``used``.

    An accumulation that was changed by the user counts as given. Raises TopologyError when the number of processes
    changed and the global batch cannot be kept, or is not to be.
    """
    given, world = int(args.gradient_accumulation_steps), int(args.world_size)
    if world == saved_world:
        return saved["used"] if given == saved["given"] else given
    product = saved_world * saved["used"]
    if on_resize != "keep_global_batch":
        raise TopologyError(
            f"The run was saved by {saved_world} processes and is resumed by {world}, and on_resize is {on_resize!r}; "
            "the Trainer's place in the data needs the same samples in each update.",
            hint=f"Start {saved_world} processes, or set on_resize (SPOT_ON_RESIZE) to 'keep_global_batch'.",
        )
    if product % world:
        raise TopologyError(
            f"The run was saved by {saved_world} processes with an accumulation of {saved['used']}: {product} batches "
            f"in each update, which {world} processes cannot share.",
            hint=f"Start a number of processes that divides {product}.",
        )
    if args.process_index == 0:
        log.warning(
            "spot: saved by %d processes, resumed by %d: gradient_accumulation_steps is %d now, so that each update "
            "has the samples that it had", saved_world, world, product // world,
        )
    return product // world


def check_order(place: Mapping[str, Any], loader: Any, *, saved_world: int, world: int) -> None:
    """Raises TopologyError for a loader whose order depends on the number of processes, or is not known."""
    if place.get("kind") != "IndexedView" or not _compat.shares_one_order(loader):
        raise TopologyError(
            f"The run was saved by {saved_world} processes and is resumed by {world}: how the data of this loader are "
            "shared out depends on their number.",
            hint=f"Start {saved_world} processes, or use a map-style data set with the Trainer's random or sequential "
            "order (use_seedable_sampler=True).",
        )
