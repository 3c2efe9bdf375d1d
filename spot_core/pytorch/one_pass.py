"""One pass over the user's own sampler: from where, under which seed, how far."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping, Sized
from typing import Any

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from spot_core.pytorch.order import Order
from spot_core.pytorch.sampling import GlobalSampler
from spot_core.pytorch.streams import StreamIterator

log = logging.getLogger(__name__)

_NEEDS_NO_RNG = (SequentialSampler, DistributedSampler, GlobalSampler)
_DRAWS_FROM_TORCH = (RandomSampler, SubsetRandomSampler, WeightedRandomSampler)


class OnePass:
    """One pass over the user's sampler: from where, under which seed, how far."""

    dealt = False
    weight = 1.0

    def __init__(self, loader: DataLoader[Any], *, seed: int, world_size: int) -> None:
        """`seed`: of the private stream of this pass, for samplers that have no generator."""
        self._loader = loader
        self._source = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        self._batched = loader.batch_sampler is not None
        self._loader_generator = loader.generator
        self._samplers = _distinct(*_nested(loader.batch_sampler), *_nested(loader.sampler))
        self._generators = [
            g for g in _distinct(loader.generator, *(getattr(s, "generator", None) for s in self._samplers))
            if isinstance(g, torch.Generator)
        ]
        self.length = len(self._source) if isinstance(self._source, Sized) else None
        self.batches = 0
        self.samples = 0
        self.memory: dict[str, Any] = {}
        self._skip = 0
        self._sizes: deque[int] = deque()
        self._seed = seed
        self._world_size = world_size

    def take_up(self, state: Mapping[str, Any]) -> None:
        """Start at a place that as many ranks saved with batches as large, instead of the beginning."""
        self._put_back(state)
        self.batches, self.samples = state["batches"], state["samples"]
        self._skip = self.batches
        if state["batches_in_pass"] != self.length:
            log.warning("the data had %s batches per pass when the place was saved and have %s now: the place is kept "
                        "by counting batches", state["batches_in_pass"], self.length)

    def pass_over(self, state: Mapping[str, Any]) -> None:
        """The saved pass has ended: leave what draws by itself as that pass had left it. Reads no data."""
        remembers = any(saved is not None and "state" in saved for saved in state.get("samplers", ()))
        if state["pass"] >= 0 and (remembers or state.get("generators")):
            self._put_back(state)
            if self._loader_generator is not None:  # a DataLoader draws the seed of its workers from it first
                torch.empty((), dtype=torch.int64).random_(generator=self._loader_generator)
            deque(self._iterate(), maxlen=0)

    def _put_back(self, state: Mapping[str, Any]) -> None:
        """Generators and samplers as they were when the saved pass began."""
        for generator, saved in zip(self._generators, state["generators"], strict=False):
            generator.set_state(saved)
        for sampler, saved in zip(self._samplers, state["samplers"], strict=False):
            if saved is None:
                continue
            if "state" in saved and hasattr(sampler, "load_state_dict"):
                sampler.load_state_dict(saved["state"])
            elif "epoch" in saved and hasattr(sampler, "set_epoch"):
                sampler.set_epoch(saved["epoch"])

    def remember(self) -> None:
        """What the same pass needs to be opened again: generators and samplers as they are at its beginning."""
        self.memory = {
            "generators": [generator.get_state() for generator in self._generators],
            **self._remember_samplers(),
        }

    def _remember_samplers(self) -> dict[str, Any]:
        order = self.order()
        return {
            "samplers": [_sampler_state(sampler) for sampler in self._samplers],
            "order": None if order is None else order.to_state(),
        }

    def order(self) -> Order | None:
        """The order of this pass, where it can be told. Its generator, if any, has to be at the pass's beginning."""
        return Order.of(self._loader, seed=self._seed)

    def indices(self) -> Iterator[tuple[int, Any]]:
        """(batch number, index or indices) from the place on."""
        # A DistributedSampler is told its epoch after workers-less loaders were opened: look again.
        self.memory |= self._remember_samplers()
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

    def place(self) -> dict[str, Any]:
        return {
            "batches": self.batches,
            "samples": self.samples,
            "offset": self.samples * self._world_size,
            "part": 0,
            "batches_in_pass": self.length,
            **self.memory,
        }


def _nested(sampler: Any) -> Iterator[Any]:
    """A sampler and those it draws from, outermost first: trainers put a batch sampler around the user's."""
    while sampler is not None:
        yield sampler
        sampler = getattr(sampler, "batch_sampler", None) or getattr(sampler, "sampler", None)


def _sampler_state(sampler: Any) -> dict[str, Any] | None:
    if hasattr(sampler, "state_dict") and hasattr(sampler, "load_state_dict"):
        return {"state": sampler.state_dict()}
    epoch = getattr(sampler, "epoch", None)
    return {"epoch": epoch} if isinstance(epoch, int) and hasattr(sampler, "set_epoch") else None


def _distinct(*values: Any) -> list[Any]:
    return list({id(value): value for value in values if value is not None}.values())
