"""The training loader of a fit, shown to the Trainer through a view that can say where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate_spot.trainer import _compat
from spot_core.pytorch.position import resumable
from spot_core.pytorch.workers import protect


class TrainingData:
    """`loader` is what the Trainer gets: its own one, reading from a view, or the view itself.

    seed: decides the order where the sampler draws from no generator of its own; the same on every rank.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int, world_size: int) -> None:
        inner = _compat.inner_loader(loader)
        self._wrapper = None if inner is None else loader
        self._view = resumable(loader if inner is None else inner, seed=seed, rank=rank, world_size=world_size)
        if inner is None:
            self.loader: Any = self._view
        else:
            _compat.set_inner_loader(loader, self._view)
            self._view.look_ahead = True
            self.loader = loader

    def place(self) -> dict[str, Any]:
        """Behind the last batch that was trained on."""
        self._view.behind = 0 if self._wrapper is None else _compat.fetched_ahead(self._wrapper)
        try:
            return self._view.state_dict()
        finally:
            self._view.behind = 0  # accelerate asks for the state at every batch

    @property
    def made(self) -> Any:
        """What the Trainer had made: accelerate's loader, or whatever a subclass gives."""
        return self._view if self._wrapper is None else self._wrapper

    def take_up(self, place: dict[str, Any], *, ended: bool) -> None:
        """The next epoch (the same one again, or with `ended` the one after it) begins there."""
        if ended:  # what was fetched ahead in an epoch that was left early is not fetched again
            ahead = ("rng_before_next", "ahead")
            place = {**{name: value for name, value in place.items() if name not in ahead}, "ended": True}
        self._view.load_state_dict(place)


class Later:
    """A loader without its first batches, which are read and dropped: then its view has counted them."""

    def __init__(self, loader: Any, batches: int) -> None:
        self._loader, self._batches = loader, batches

    def __getattr__(self, name: str) -> Any:
        if name in ("_loader", "_batches"):
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        items = iter(self._loader)
        for _ in range(self._batches):
            next(items, None)
        return items


def protected(loader: Any) -> Any:
    """For loaders that are read while a notice may come: it must not take the workers first."""
    inner = _compat.inner_loader(loader)
    plain = loader if inner is None else inner
    if isinstance(plain, DataLoader):
        protect(plain)
    return loader
