"""A loader of accelerate's that reads from a view: where it stands in the data can be said, and taken up again.

accelerate's loaders hold a DataLoader in `base_dataloader`, read it one step ahead and pass the batches on. The view
takes that DataLoader's place, so padding, placement on devices and dispatching stay accelerate's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from accelerate_spot import _compat
from spot_core.pytorch.position import ResumableView, resumable


class Reading:
    """One loader and its view."""

    def __init__(self, loader: Any, *, seed: int, rank: int, world_size: int) -> None:
        """Collective. seed: decides the order where the sampler has no generator; the same on every rank."""
        self.loader = loader
        self.dispatched = _compat.dispatches(loader)
        """The first process reads for all."""
        self.per_step = world_size if self.dispatched and not loader.split_batches else 1
        """Batches that one step takes from the view."""
        self.base = base = loader.base_dataloader
        """The DataLoader that accelerate's loader read from before."""
        self.view: ResumableView = resumable(
            base,
            seed=seed,
            rank=rank,
            world_size=1 if self.dispatched else world_size,
            by_index=True,
            read_ahead=True,
        )
        self.view.remember(self.per_step)
        self.view.look_ahead = getattr(base, "num_workers", 0) == 0
        loader.base_dataloader = self.view
        # With several processes older accelerate (1.10) takes the state of any loader for that of torchdata's.
        loader.adjust_state_dict_for_prefetch = lambda: None
        sampler = _compat.seedable_sampler(loader)
        if sampler is not None:  # its own seed is that of the process, unless the script sets one
            sampler.initial_seed = int(_compat.from_first(sampler.initial_seed))

    def place(self, *, ended: bool) -> dict[str, Any]:
        """Behind the last step that the script was given. ended: it is the last one, nothing was fetched beyond it."""
        fetched = self.view.fetched
        # The last step of a pass may take fewer batches than the others.
        self.view.behind = 0 if ended else min(fetched, fetched % self.per_step or self.per_step)
        try:
            place = self.view.state_dict()
        finally:
            self.view.behind = 0  # accelerate asks for the state at every batch
        sampler = _compat.seedable_sampler(self.loader)
        return place if sampler is None else {**place, "order_seed": int(sampler.initial_seed)}

    def take_up(self, place: Mapping[str, Any]) -> None:
        """The next pass goes on from there, in the order that was begun."""
        sampler = _compat.seedable_sampler(self.loader)
        if sampler is not None and "order_seed" in place:
            sampler.initial_seed = place["order_seed"]
        self.view.load_state_dict(place)


def without_ahead(place: Mapping[str, Any]) -> dict[str, Any]:
    """The place without how the batch behind it was drawn: it will be drawn anew, or was in a pass that was left."""
    return {name: value for name, value in place.items() if name not in ("rng_before_next", "ahead")}


def moved(place: Mapping[str, Any], view: ResumableView, *, world_size: int, batches: int) -> dict[str, Any]:
    """A place that another number of processes saved as one of this process: `batches` of its own into the pass.

    view: the one that is to be put there. What is drawn between the place and the look-ahead is drawn anew.
    """
    present = view.state_dict()
    size = int(present.get("batch") or 1)
    return {
        **without_ahead(place),
        **{name: present[name] for name in ("world", "batch", "deal") if name in present},
        "order": None,
        "batches": batches,
        "samples": batches * size,
        "offset": batches * size * world_size,
        "batches_in_pass": None if place["batches_in_pass"] is None else len(view),
        "part": 0,
        "dealt": False,
    }
