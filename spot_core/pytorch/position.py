"""A DataLoader whose place in the data can be saved and taken up again, exactly.

`resumable(loader, seed=...)` gives a view of the user's loader: the same batches, the same attributes, and
`state_dict` / `load_state_dict`. The order of pass p is a function of (seed, p) alone; the place in it is a number of
batches and of samples. Going back to a place skips indices, not data: nothing is read to be thrown away.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from spot_core.pytorch._private import drop_kept_iterator, iterates_plainly, kept_iterator
from spot_core.pytorch.one_pass import OnePass
from spot_core.pytorch.replay import DirectView, ReplayView, StatefulView
from spot_core.pytorch.streams import mix
from spot_core.pytorch.view import ResumableView
from spot_core.pytorch.worker_seed import KeyedDataset, KeyedIndex
from spot_core.pytorch.workers import protect

__all__ = ["ResumableView", "resumable"]

log = logging.getLogger(__name__)


def resumable(
    loader: Any,
    *,
    seed: int,
    rank: int = 0,
    world_size: int = 1,
    by_index: bool = False,
    read_ahead: bool | None = None,
) -> ResumableView:
    """A resumable view of any iterable of batches.

    `seed` decides the order (give every rank the same one); `rank` keeps the random draws of different ranks' workers
    apart. A map-style DataLoader is taken up by index. Of anything else (iterable data sets, loaders that iterate in
    their own way, lists) the passed part is read again and dropped, which is exact when reading it again gives the
    same, and a loader with `state_dict`/`load_state_dict` of its own is asked for its state: at every batch when the
    trainer has `read_ahead` of the one it trains on, else when a state is asked for (by default loaders without a
    length are taken to be read ahead). With `by_index` torchdata's StatefulDataLoader over a data set that has no state
    is taken up by index too: its own state knows neither the order nor its workers' generators.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        if by_index and isinstance(loader, DataLoader) and _is_only_indexed(loader.dataset):
            return IndexedView(loader, seed=seed, rank=rank, world_size=world_size)
        direct = _has_length(loader) if read_ahead is None else not read_ahead
        return DirectView(loader) if direct else StatefulView(loader)
    if isinstance(loader, DataLoader) and iterates_plainly(loader):
        if not getattr(loader, "in_order", True) and loader.num_workers > 0:
            log.warning("a DataLoader with in_order=False gives its batches in no fixed order: the data after a resume "
                        "need not be those of an uninterrupted run; set in_order=True")
        if not isinstance(loader.dataset, IterableDataset):
            return IndexedView(loader, seed=seed, rank=rank, world_size=world_size)
    return ReplayView(loader, seed=seed, rank=rank)


def _is_only_indexed(data: Any) -> bool:
    return not isinstance(data, IterableDataset) and not hasattr(data, "state_dict")


def _has_length(loader: Any) -> bool:
    """Trainers read a loader without a length one batch ahead."""
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True


class IndexedView(ResumableView):
    """A map-style DataLoader: the place is an index into the order of the pass."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, world_size: int) -> None:
        super().__init__(loader)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._pass = -1
        self._inner: DataLoader[Any] | None = None
        self._opening: OnePass | None = None

    @property
    def _iterator(self) -> Any:
        # Lightning ends the workers of a loader through this attribute of DataLoader.
        return None if self._inner is None else kept_iterator(self._inner)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if self._inner is not None:
            drop_kept_iterator(self._inner, value)

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def _open(self) -> Iterator[Any]:
        state = self._take_pending()
        opening = OnePass(self._loader)
        if state is not None:
            self._seed, self._pass = state["seed"], state["pass"]
        if state is None or state["pass"] < 0 or state.get("ended"):
            if state is not None and state.get("ended"):
                opening.pass_over(state, mix(self._seed, self._pass))
            self._pass += 1
        else:
            opening.take_up(state, self._world_size)
        opening.seeds(self._seed, self._pass, self._rank)
        opening.remember()
        self._opening = opening
        if self._inner is None:
            self._inner = self._build()
        base = self._inner.generator
        if base is not self._loader.generator and base is not None:
            base.manual_seed(mix(self._seed, self._pass, self._rank, 1))  # seeds of the workers
        items = iter(self._inner)
        self._places.clear()
        self._note(self._place())
        return items

    def _build(self) -> DataLoader[Any]:
        """The loader that does the work, made late: trainers set `worker_init_fn` after they have wrapped."""
        user = self._loader
        source = user.sampler if user.batch_sampler is None else user.batch_sampler
        order = _Order(self, len(source) if hasattr(source, "__len__") else None)
        which = {"batch_size": None, "sampler": order} if user.batch_sampler is None else {"batch_sampler": order}
        keyword: dict[str, Any] = {
            "num_workers": user.num_workers,
            "collate_fn": user.collate_fn,
            "pin_memory": user.pin_memory,
            "timeout": user.timeout,
            "worker_init_fn": user.worker_init_fn,
            "multiprocessing_context": user.multiprocessing_context,
            "prefetch_factor": user.prefetch_factor,
            "persistent_workers": user.persistent_workers,
            "generator": torch.Generator() if user.generator is None else user.generator,
            "in_order": getattr(user, "in_order", True),
        }
        if user.pin_memory_device:
            keyword["pin_memory_device"] = user.pin_memory_device
        data = KeyedDataset(user.dataset) if user.num_workers > 0 else user.dataset
        return protect(DataLoader(data, **which, **keyword))

    def requests(self) -> Iterator[Any]:
        """What the inner loader fetches, in order; called by it at the start of a pass (so the pass is open)."""
        if self._opening is None:
            raise RuntimeError("indices were asked for before the pass was opened")
        if self._loader.num_workers > 0:
            return _keyed(self._opening.indices(), self._seed, self._rank, self._pass)
        return (index for _, index in self._opening.indices())

    def _advance(self) -> dict[str, Any]:
        if self._opening is None:
            raise RuntimeError("a batch came before the pass was opened")
        self._opening.consumed()
        return self._place()

    def _place(self) -> dict[str, Any]:
        opening = self._opening
        if opening is None:
            raise RuntimeError("no pass is open")
        return {
            "kind": type(self).__name__,
            "seed": self._seed,
            "pass": self._pass,
            "batches": opening.batches,
            "samples": opening.samples,
            "offset": opening.samples * self._world_size,
            "batches_in_pass": opening.length,
            **opening.memory,
        }


def _keyed(indices: Iterator[tuple[int, Any]], seed: int, rank: int, number: int) -> Iterator[KeyedIndex]:
    for batch, index in indices:
        yield KeyedIndex(index, mix(seed, rank, number, batch))


class _Order:
    """The sampler of the inner loader.

    It holds its view weakly: a cycle through kept workers would be freed by whichever process happens to collect it.
    """

    def __init__(self, view: IndexedView, length: int | None) -> None:
        self._view = weakref.ref(view)
        self._length = length

    def __iter__(self) -> Iterator[Any]:
        view = self._view()
        if view is None:
            raise RuntimeError("the view of this loader is gone")
        return view.requests()

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("the sampler has no length")
        return self._length
