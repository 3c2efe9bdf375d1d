"""A DataLoader whose place in the data can be saved and taken up again, exactly.

`resumable(loader, seed=...)` gives a view of the user's loader: the same batches, the same attributes, and
`state_dict` / `load_state_dict`. The order of pass p is a function of (seed, p) alone; the place in it is a number of
batches and of samples. Going back to a place skips indices, not data: nothing is read to be thrown away.
"""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from spot_core.pytorch._private import drop_kept_iterator, iterates_plainly, kept_iterator
from spot_core.pytorch.sampling import GlobalSampler
from spot_core.pytorch.streams import CpuRng, StreamIterator, isolated, mix
from spot_core.pytorch.worker_seed import KeyedDataset, KeyedIndex

log = logging.getLogger(__name__)

_NEEDS_NO_RNG = (SequentialSampler, DistributedSampler, GlobalSampler)
_DRAWS_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)
_HISTORY = 4  # places kept: a trainer fetches at most a batch or two ahead of the one it trains on


def resumable(loader: Any, *, seed: int, rank: int = 0, world_size: int = 1) -> ResumableView:
    """A resumable view of any iterable of batches.

    `seed` decides the order (give every rank the same one); `rank` keeps the random draws of different ranks' workers
    apart. A map-style DataLoader is taken up by index. Of anything else (iterable data sets, loaders that iterate in
    their own way, lists) the passed part is read again and dropped, which is exact when reading it again gives the
    same, and a loader with `state_dict`/`load_state_dict` of its own is asked for its state at every batch.
    """
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        return StatefulView(loader)
    if isinstance(loader, DataLoader) and iterates_plainly(loader):
        if not getattr(loader, "in_order", True) and loader.num_workers > 0:
            log.warning("a DataLoader with in_order=False gives its batches in no fixed order: the data after a resume "
                        "need not be those of an uninterrupted run; set in_order=True")
        if not isinstance(loader.dataset, IterableDataset):
            return IndexedView(loader, seed=seed, rank=rank, world_size=world_size)
    return ReplayView(loader, seed=seed, rank=rank)


class ResumableView:
    """What all views share: they look like the loader they show, count what was fetched and know their last places.

    `behind` is the number of fetched batches that the trainer has not consumed (it looked ahead); `state_dict` then
    tells the place before them. With `look_ahead` the states of the CPU generators before each fetch are kept too:
    a batch that was fetched early must be fetched again under the generators it saw the first time.
    """

    _own = frozenset(
        {"_loader", "_pending", "_places", "_reseed", "behind", "look_ahead", "_pass", "_inner", "_iterator"}
        | {"_seed", "_rank", "_world_size", "_opening"}
    )

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        self._pending: Mapping[str, Any] | None = None
        self._reseed: CpuRng | None = None
        self._places: deque[tuple[dict[str, Any], CpuRng | None]] = deque(maxlen=_HISTORY)
        self.behind = 0
        self.look_ahead = False

    @property
    def __class__(self) -> Any:  # `isinstance(view, DataLoader)` answers as for the loader itself
        return type(self._loader)

    def __getattr__(self, name: str) -> Any:
        if name in ResumableView._own:
            raise AttributeError(name)
        return getattr(self._loader, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ResumableView._own:
            object.__setattr__(self, name, value)
        else:
            setattr(self._loader, name, value)

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        items = self._open()
        reseed, self._reseed = self._reseed, None
        return self._count(items, reseed)

    def _count(self, items: Iterator[Any], reseed: CpuRng | None) -> Iterator[Any]:
        """Yields the batches, noting the place after each."""
        while True:
            before = CpuRng.capture() if self.look_ahead else None
            try:
                if reseed is not None:
                    with isolated(reseed):
                        batch = next(items)
                    before, reseed = reseed, None
                else:
                    batch = next(items)
            except StopIteration:
                return
            self._note(self._advance(), before)
            yield batch

    def _note(self, place: dict[str, Any], before: CpuRng | None = None) -> None:
        self._places.append((place, before))

    def state_dict(self) -> dict[str, Any]:
        """The place after the last consumed batch; plain values and tensors."""
        if self._pending is not None:
            return dict(self._pending)
        if not self._places:
            return {"kind": type(self).__name__, "pass": -1, **self._identity()}
        at = max(len(self._places) - 1 - self.behind, 0)
        state = dict(self._places[at][0])
        if self.behind and at + 1 < len(self._places):
            before = self._places[at + 1][1]
            if before is not None:
                state["rng_before_next"] = before.to_state()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter` goes on from this place; with `ended` set, at the beginning of the pass after it."""
        self._pending = dict(state)
        rng = state.get("rng_before_next")
        self._reseed = None if rng is None else CpuRng.from_state(rng)

    def _take_pending(self) -> Mapping[str, Any] | None:
        pending, self._pending = self._pending, None
        if pending is not None and pending["kind"] != type(self).__name__:
            log.warning("the saved place is of a %s, the loader now gives a %s: it starts at the beginning of its data",
                        pending["kind"], type(self).__name__)
            return None
        return pending

    def _identity(self) -> dict[str, Any]:
        return {}

    def _open(self) -> Iterator[Any]:
        raise NotImplementedError

    def _advance(self) -> dict[str, Any]:
        raise NotImplementedError


class IndexedView(ResumableView):
    """A map-style DataLoader: the place is an index into the order of the pass."""

    def __init__(self, loader: DataLoader[Any], *, seed: int, rank: int, world_size: int) -> None:
        super().__init__(loader)
        self._seed, self._rank, self._world_size = seed, rank, world_size
        self._pass = -1
        self._inner: DataLoader[Any] | None = None
        self._opening: _Opening | None = None

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
        opening = _Opening(self._loader)
        if state is not None:
            self._seed, self._pass = state["seed"], state["pass"]
        if state is None or state["pass"] < 0 or state.get("ended"):
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
        return DataLoader(data, **which, **keyword)

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


class _Opening:
    """One pass over the user's sampler: from where, under which seed, how far."""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._batched = loader.batch_sampler is not None
        self._samplers = _distinct(
            loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None), loader.sampler
        )
        self._generators = [
            g for g in _distinct(loader.generator, *(getattr(s, "generator", None) for s in self._samplers))
            if isinstance(g, torch.Generator)
        ]
        self.length = len(self._source) if hasattr(self._source, "__len__") else None
        self.batches = 0
        self.samples = 0
        self.memory: dict[str, Any] = {}
        self._skip = 0
        self._sizes: deque[int] = deque()
        self._seed = 0

    def take_up(self, state: Mapping[str, Any], world_size: int) -> None:
        """Start at a saved place instead of the beginning."""
        for generator, saved in zip(self._generators, state["generators"], strict=False):
            generator.set_state(saved)
        for sampler, saved in zip(self._samplers, state["samplers"], strict=False):
            if saved is None:
                continue
            if "state" in saved and hasattr(sampler, "load_state_dict"):
                sampler.load_state_dict(saved["state"])
            elif "epoch" in saved and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(saved["epoch"])
        self.batches, self.samples = state["batches"], state["samples"]
        self._skip = self.batches
        seeking = next((s for s in self._samplers if isinstance(s, GlobalSampler)), None)
        if seeking is not None:  # an offset into the data, whatever the batch size and the number of ranks were
            seeking.seek(state["offset"])
            self.samples = state["offset"] // world_size
            self._skip = 0
        elif state["batches_in_pass"] != self.length:
            log.warning("the data had %s batches per pass when the place was saved and have %s now: the place is kept "
                        "by counting batches", state["batches_in_pass"], self.length)

    def remember(self) -> None:
        """What the same pass needs to be opened again: generators and samplers as they are at its beginning."""
        self.memory = {
            "generators": [generator.get_state() for generator in self._generators],
            "samplers": [_sampler_state(sampler) for sampler in self._samplers],
        }

    def seeds(self, seed: int, number: int, rank: int) -> None:
        self._seed = mix(seed, number)

    def indices(self) -> Iterator[tuple[int, Any]]:
        """(batch number, index or indices) from the place on."""
        # A DistributedSampler is told its epoch after workers-less loaders were opened: look again.
        self.memory["samplers"] = [_sampler_state(sampler) for sampler in self._samplers]
        number = self.batches - self._skip
        for request in self._iterate():
            number += 1
            if self._skip > 0:
                self._skip -= 1
                continue
            self._sizes.append(len(request) if self._batched else 1)
            yield number - 1, request

    def _iterate(self) -> Iterator[Any]:
        kinds = {type(s) for s in self._samplers} - {BatchSampler}
        own_generators = all(getattr(s, "generator", None) is not None for s in self._samplers
                             if isinstance(s, _DRAWS_FROM_TORCH))
        if all(k in _NEEDS_NO_RNG or (k in _DRAWS_FROM_TORCH and own_generators) for k in kinds):
            return iter(self._source)
        torch_only = all(k in _NEEDS_NO_RNG + _DRAWS_FROM_TORCH for k in kinds)
        return StreamIterator(self._source, self._seed, torch_only=torch_only)

    def consumed(self) -> None:
        self.batches += 1
        self.samples += self._sizes.popleft()


def _sampler_state(sampler: Any) -> dict[str, Any] | None:
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"state": sampler.state_dict()}
    epoch = getattr(sampler, "epoch", None)
    return {"epoch": epoch} if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def _distinct(*values: Any) -> list[Any]:
    return list({id(value): value for value in values if value is not None}.values())


class ReplayView(ResumableView):
    """Anything that can only be read from its beginning: the passed part is read again and dropped."""

    def __init__(self, loader: Any, *, seed: int, rank: int) -> None:
        super().__init__(loader)
        self._seed, self._rank, self._world_size = seed, rank, 1
        self._pass = -1
        self._inner: Any = None
        self._opening: dict[str, Any] = {}

    def _identity(self) -> dict[str, Any]:
        return {"seed": self._seed}

    def _open(self) -> Iterator[Any]:
        state = self._take_pending()
        if state is not None:
            self._seed, self._pass = state["seed"], state["pass"]
        if state is None or state["pass"] < 0 or state.get("ended"):
            self._pass += 1
            self._opening = {"batches": 0, "rng_at_start": CpuRng.capture().to_state()}
            items = self._iterate()
        else:
            batches = state["batches"]
            self._opening = {"batches": batches, "rng_at_start": state["rng_at_start"]}
            log.info("reading and dropping %d batches of %s to find the place; give the loader state_dict and "
                     "load_state_dict (torchdata's StatefulDataLoader has them) to save this time",
                     batches, type(self._loader).__name__)
            with isolated(CpuRng.from_state(state["rng_at_start"])):
                items = self._iterate()
                for _ in range(batches):
                    if next(items, self) is self:
                        break
        self._places.clear()
        self._note(self._place())
        return items

    def _iterate(self) -> Iterator[Any]:
        user = self._loader
        if isinstance(user, DataLoader) and user.generator is None and iterates_plainly(user):
            # Seeds of the workers from the pass, not from where the global generator happens to stand.
            user.generator = torch.Generator()
            user.generator.manual_seed(mix(self._seed, self._pass, self._rank, 1))
            try:
                return iter(user)
            finally:
                user.generator = None
        return iter(user)

    def _advance(self) -> dict[str, Any]:
        self._opening = {**self._opening, "batches": self._opening["batches"] + 1}
        return self._place()

    def _place(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "seed": self._seed, "pass": self._pass, **self._opening}


class StatefulView(ResumableView):
    """A loader that has a state of its own, asked after each fetch, so that the state of the consumed batch is known.

    Without this the state of a loader that is read one batch ahead names a place one batch too far.
    """

    def _open(self) -> Iterator[Any]:
        state = self._take_pending()
        if state is not None and state.get("loader") is not None and not state.get("ended"):
            self._loader.load_state_dict(state["loader"])
        items = iter(self._loader)
        self._places.clear()
        self._note(self._place())
        return items

    def _advance(self) -> dict[str, Any]:
        return self._place()

    def _place(self) -> dict[str, Any]:
        return {"kind": type(self).__name__, "pass": 0, "loader": _frozen(self._loader.state_dict())}


def _frozen(state: Any) -> Any:
    """A copy that the loader's next step cannot change."""
    if isinstance(state, torch.Tensor):
        return state.clone()
    if isinstance(state, dict):
        return {key: _frozen(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(_frozen(value) for value in state)
    return state
