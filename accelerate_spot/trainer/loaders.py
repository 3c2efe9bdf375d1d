"""The training loader of a fit, shown to the Trainer through a view that can say where it is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch.utils.data import DataLoader

from accelerate_spot.reading import Reading, without_ahead
from accelerate_spot.trainer import _compat
from spot_core.pytorch.position import ResumableView, resumable
from spot_core.pytorch.workers import protect


class TrainingData:
    """`loader` is what the Trainer gets: its own one, reading from a view, or the view itself.

    seed: decides the order where the sampler draws from no generator of its own; the same on every rank.
    """

    def __init__(self, loader: Any, *, seed: int, rank: int, world_size: int) -> None:
        ranks = {"rank": rank, "world_size": world_size}
        self._reading = None if _compat.inner_loader(loader) is None else Reading(loader, seed=seed, **ranks)
        self.view: ResumableView = (
            resumable(loader, seed=seed, **ranks) if self._reading is None else self._reading.view
        )
        self.loader: Any = self.view if self._reading is None else loader

    def place(self) -> dict[str, Any]:
        """Behind the last batch that was trained on."""
        reading = self._reading
        return self.view.state_dict() if reading is None else reading.place(ended=reading.loader.end_of_dataloader)

    def take_up(self, place: dict[str, Any], *, ended: bool) -> None:
        """The next epoch (the same one again, or with `ended` the one after it) begins there."""
        if ended:  # what was fetched ahead in an epoch that was left early is not fetched again
            place = {**without_ahead(place), "ended": True}
        (self.view.load_state_dict if self._reading is None else self._reading.take_up)(place)


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
