"""A DataLoader whose place in the data can be saved and taken up again, exactly.

`resumable(loader, seed=...)` gives a view of the user's loader: the same batches, the same attributes, and
`state_dict` / `load_state_dict`. The order of pass p is a function of (seed, p) alone; the place in it is a number of
batches and of samples. Going back to a place skips indices, not data: nothing is read to be thrown away.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from spot_core.errors import ResumeMismatchError, TopologyError
from spot_core.pytorch._private import drop_kept_iterator, iterates_plainly, kept_iterator
from spot_core.pytorch.deal import Deal, origin_of
from spot_core.pytorch.dealt_pass import DealtPass, batch_size_of
from spot_core.pytorch.hf_streams import states_are_not_whole
from spot_core.pytorch.one_pass import OnePass
from spot_core.pytorch.order import Order
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
    deal: Deal | None = None,
    by_index: bool = False,
    read_ahead: bool | None = None,
) -> ResumableView:
    """A resumable view of any iterable of batches.

    `seed` decides the order (give every rank the same one); `rank` keeps the random draws of different ranks' workers
    apart. A map-style DataLoader is taken up by index. Of anything else (iterable data sets, loaders that iterate in
    their own way, lists) the passed part is read again and dropped, which is exact when reading it again gives the
    same, and a loader with `state_dict`/`load_state_dict` of its own is asked for its state, unless that is known to
    leave something out: at every batch when the trainer has `read_ahead` of the one it trains on, else when a state is
    asked for (by default loaders without a length are taken to be read ahead). With `by_index` torchdata's
    StatefulDataLoader over a data set that has no state is taken up by index too: its own state knows neither the order
    nor its workers' generators.

    `deal`: go through the data in these global batches instead of those of the present ranks and batch size (see
    `deal_of`). Only a map-style DataLoader whose order is known can be dealt, or be put at a place that another number
    of ranks saved: TopologyError otherwise.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        if by_index and isinstance(loader, DataLoader) and _is_only_indexed(loader.dataset):
            return IndexedView(loader, seed=seed, rank=rank, world_size=world_size, deal=deal)
        if states_are_not_whole(loader):
            return ReplayView(loader, seed=seed, rank=rank, world_size=world_size)
        direct = _has_length(loader) if read_ahead is None else not read_ahead
        return (DirectView if direct else StatefulView)(loader, world_size=world_size)
    if isinstance(loader, DataLoader) and iterates_plainly(loader):
        if not getattr(loader, "in_order", True) and loader.num_workers > 0:
            log.warning("a DataLoader with in_order=False gives its batches in no fixed order: the data after a resume "
                        "need not be those of an uninterrupted run; set in_order=True")
        if not isinstance(loader.dataset, IterableDataset):
            return IndexedView(loader, seed=seed, rank=rank, world_size=world_size, deal=deal)
    return ReplayView(loader, seed=seed, rank=rank, world_size=world_size)


def deal_of(
    place: Mapping[str, Any], *, on_resize: str, saved: int, world: int, speaks: bool = True
) -> Deal | None:
    """What to give `resumable` as `deal` for a place that `saved` ranks left to `world` ranks; see `origin_of`.

    None for the global batches of the present ranks, and for a loader that is not placed by index.
    Raises TopologyError when the number of ranks changed and `on_resize` is "refuse".
    """
    known = Deal(**place["deal"]) if place.get("deal") else None
    origin = saved if known is None else known.origin
    origin = origin_of(on_resize, saved=saved, world=world, origin=origin, speaks=speaks)
    if known is None or known.origin != origin:
        return None
    # As many ranks as saved, with blocks of their own: should the batch size be another one now, that is meant.
    return None if saved == world == origin else known


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

    def __init__(
        self, loader: DataLoader[Any], *, seed: int, rank: int, world_size: int, deal: Deal | None = None
    ) -> None:
        super().__init__(loader, world_size=world_size)
        self._seed, self._rank = seed, rank
        self._pass = -1
        self._inner: DataLoader[Any] | None = None
        self._opening: OnePass | DealtPass | None = None
        self._inherited: Order | None = None
        self._deal = deal

    @property
    def splits(self) -> int:
        batch = batch_size_of(self._loader)
        return 1 if self._deal is None or batch is None else self._deal.splits(self._world_size, batch)

    @property
    def weight(self) -> float:
        return 1.0 if self._opening is None else self._opening.weight

    @property
    def batches_left(self) -> int | None:
        opening = self._opening
        if isinstance(opening, DealtPass):
            return opening.left()
        return None if opening is None or opening.length is None else opening.length - opening.batches

    def _check_world(self, state: Mapping[str, Any]) -> None:
        """Any number of ranks can share out the rest of an order; `_take_up` looks whether it is known."""

    def __len__(self) -> int:
        if self._plain:
            return len(self._loader)
        return self._dealt().whole()

    @property
    def _iterator(self) -> Any:
        # Lightning ends the workers of a loader through this attribute of DataLoader.
        return None if self._inner is None else kept_iterator(self._inner)

    @_iterator.setter
    def _iterator(self, value: Any) -> None:
        if self._inner is not None:
            drop_kept_iterator(self._inner, value)

    def _identity(self) -> dict[str, Any]:
        deal = self._deal or self._natural()
        return {
            "seed": self._seed,
            "batch": batch_size_of(self._loader),
            "deal": None if deal is None else dataclasses.asdict(deal),
        }

    def _open(self) -> Iterator[Any]:
        state = self._take_pending()
        if state is not None:
            self._seed, self._pass = state["seed"], state["pass"]
        if state is None or state["pass"] < 0 or state.get("ended"):
            if state is not None and state.get("ended"):
                self._one_pass().pass_over(state)
            self._pass += 1
            self._follow(state)
            opening: OnePass | DealtPass = self._one_pass() if self._plain else self._dealt()
        else:
            opening = self._take_up(state)
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

    # -- which samples, in which order -------------------------------------------------------------------------------

    @property
    def _plain(self) -> bool:
        """Whether the loader's own samplers serve a pass."""
        natural = self._deal is None or self._deal == self._natural()
        return natural and self._inherited is None

    def _natural(self) -> Deal | None:
        batch = batch_size_of(self._loader)
        return None if batch is None else Deal(self._world_size, batch)

    @property
    def _stream_seed(self) -> int:
        return mix(self._seed, self._pass)

    def _one_pass(self) -> OnePass:
        return OnePass(self._loader, seed=self._stream_seed, world_size=self._world_size)

    def _present(self) -> Order | None:
        return Order.of(self._loader, seed=self._stream_seed)

    def _dealt(self, **place: Any) -> DealtPass:
        """Begins a pass of its own unless `place` says otherwise."""
        deal, order = self._deal or self._natural(), self._inherited or self._present()
        if deal is None or order is None:
            raise TopologyError(
                f"The data are read by {self._world_size} ranks now, in an order that another number of ranks or "
                f"another batch size began, and {_sampler_name(self._loader)} does not say what that order is.",
                hint="Start the number of ranks of the run, or let a ResumableDataModule or a GlobalSampler order it.",
            )
        make = (lambda: order.seeded(self._stream_seed)) if self._inherited else (lambda: self._present() or order)
        return DealtPass(self._loader, deal, make, rank=self._rank, world_size=self._world_size, **place)

    def _follow(self, state: Mapping[str, Any] | None) -> None:
        """A pass begins: of an order that other samplers began, it is the next one."""
        if state is not None and state.get("order") is not None:
            self._inherit(Order.from_state(state["order"]))
        if self._inherited is not None:
            self._inherited = self._inherited.next()

    def _inherit(self, saved: Order) -> None:
        present = self._present()
        if present is None or not present.stands_for(saved) or present.same(saved):
            self._inherited = None
        else:
            self._inherited = saved

    def _take_up(self, state: Mapping[str, Any]) -> OnePass | DealtPass:
        """The rest of a pass that was begun."""
        moved = state["world"] != self._world_size
        resized = moved or state["batch"] != batch_size_of(self._loader)
        if self._deal is None and not resized and state["deal"] is not None:
            self._deal = Deal(**state["deal"])
        saved = None if state["order"] is None else Order.from_state(state["order"])
        present = self._present()
        if saved is not None:
            self._inherit(saved)
        fits = saved is not None and present is not None and present.stands_for(saved)
        if not moved and not state["dealt"] and (not fits or (self._plain and not resized)):
            opening = self._one_pass()
            opening.take_up(state)
            return opening
        if saved is not None and present is not None and not fits:
            raise ResumeMismatchError(
                f"The place in the data is one among {_told(saved)}, and the loader has {_told(present)} now.",
                hint="Give the data set and the shuffling that the run was started with, or as many ranks as saved it.",
            )
        deal = self._deal or self._natural()
        same_blocks = not resized and deal is not None and state["deal"] == dataclasses.asdict(deal)
        if state["part"] and not same_blocks:
            raise TopologyError(
                "The place in the data is inside a global batch, which only the same ranks and batch size can finish.",
                hint=f"Start {state['world']} ranks, or resume from another generation.",
            )
        opening_at = self._dealt(offset=state["offset"], part=state["part"])
        if saved is not None:
            opening_at.follow(saved)
        return opening_at

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
            "world": self._world_size,
            "pass": self._pass,
            "dealt": opening.dealt,
            **self._identity(),
            **opening.place(),
        }


def _sampler_name(loader: DataLoader[Any]) -> str:
    return type(loader.sampler if type(loader.batch_sampler) in (BatchSampler, type(None)) else loader.batch_sampler
                ).__name__


def _told(order: Order) -> str:
    return f"{order.count} samples, {'shuffled' if order.shuffle else 'in order'}"


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
