"""Loaders that have no index: read again from the beginning, or asked for a state of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from torch.utils.data import DataLoader

from spot_core.clock import SYSTEM_CLOCK
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch import nested
from spot_core.pytorch._private import iterates_plainly
from spot_core.pytorch.hf_streams import begin_at_the_beginning
from spot_core.pytorch.streams import CpuRng, isolated, mix
from spot_core.pytorch.view import ResumableView
from spot_core.pytorch.workers import protect

log = logging.getLogger(__name__)


class ReplayView(ResumableView):
    """Anything that can only be read from its beginning: the passed part is read again and dropped."""

    def __init__(self, loader: Any, *, seed: int, rank: int, world_size: int = 1) -> None:
        super().__init__(loader, world_size=world_size)
        self._seed, self._rank = seed, rank
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
            self._opening = {"batches": 0, "rng_at_start": CpuRng.capture().to_state(), "read_s": 0.0}
            items = self._iterate()
        else:
            self._opening = {key: state[key] for key in ("batches", "rng_at_start", "read_s")}
            with isolated(CpuRng.from_state(state["rng_at_start"])):
                items = self._iterate()
                self._read_forward(items, state["batches"], state["read_s"])
        self._places.clear()
        self._note(self._place())
        return self._timed(items)

    def _read_forward(self, items: Iterator[Any], batches: int, read_s: float) -> None:
        """Raises ResumeMismatchError for data that end before the place."""
        name = type(self._loader).__name__
        if batches and self._rank == 0:
            log.warning(
                "spot: the data of this %s cannot be repositioned: %d batches are read again and dropped to find the "
                "place; reading them took %.0f s the first time. %s",
                name, batches, read_s, self._way_out(),
            )
        shown = self._rank == 0 and sys.stderr.isatty()
        bar = track(range(batches), f"reading {name} again", console=Console(stderr=True), disable=not shown)
        for number in bar:
            if next(items, self) is self:
                raise ResumeMismatchError(
                    f"The data of this {name} ended after {number} batches, and the place was behind {batches}: they "
                    "are not the data that the run was trained on.",
                    hint="Give the data set that the run was started with.",
                )

    def _way_out(self) -> str:
        if hasattr(self._loader, "load_state_dict"):
            return (
                "It has a state, but that of a Hugging Face stream leaves out what is in a shuffle buffer, and kept "
                "workers begin every pass at it: shuffle the shards only and set persistent_workers=False, or give a "
                "map-style data set, to save this time."
            )
        return (
            "Give it state_dict and load_state_dict (torchdata's StatefulDataLoader has them), or a map-style data "
            "set, to save this time."
        )

    def _timed(self, items: Iterator[Any]) -> Iterator[Any]:
        """Keeps account of what reading costs."""
        clock = SYSTEM_CLOCK
        while True:
            began = clock.monotonic()
            batch = next(items, self)
            if batch is self:
                return
            read_s = self._opening["read_s"] + clock.monotonic() - began
            self._opening = {**self._opening, "read_s": read_s}
            yield batch

    def _iterate(self) -> Iterator[Any]:
        user = self._loader
        if isinstance(user, DataLoader):
            protect(user)
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
        return {
            "kind": type(self).__name__,
            "world": self._world_size,
            "seed": self._seed,
            "pass": self._pass,
            **self._opening,
        }


class DirectView(ResumableView):
    """A loader with a state of its own that is read in step with the training: its state is the place."""

    def __iter__(self) -> Iterator[Any]:
        if isinstance(self._loader, DataLoader):
            protect(self._loader)
        taken_up, self._pending = self._pending is not None, None
        return _opened_again(self._loader) if taken_up else _opened(self._loader)

    def state_dict(self) -> dict[str, Any]:
        return dict(self._pending or _place_of(self, self._loader.state_dict()))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        state = _as_place(self, state)
        self._check_kind(state)
        self._check_world(state)
        if not state.get("ended") and state["kind"] == type(self).__name__:
            self._loader.load_state_dict(state["loader"])
            self._pending = state


class StatefulView(ResumableView):
    """A loader that has a state of its own, asked after each fetch, so that the state of the consumed batch is known.

    Without this the state of a loader that is read one batch ahead names a place one batch too far.
    """

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(_as_place(self, state))

    def _open(self) -> Iterator[Any]:
        state = self._take_pending()
        taken_up = state is not None and state.get("loader") is not None and not state.get("ended")
        if isinstance(self._loader, DataLoader):
            protect(self._loader)
        if taken_up:
            assert state is not None
            self._loader.load_state_dict(state["loader"])
        items = _opened_again(self._loader) if taken_up else _opened(self._loader)
        self._places.clear()
        self._note(self._place())
        return items

    def _advance(self) -> dict[str, Any]:
        return self._place()

    def _place(self) -> dict[str, Any]:
        return _place_of(self, nested.frozen(self._loader.state_dict()))


def _as_place(view: ResumableView, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """A state without a kind is the loader's own: of a checkpoint that was made without a view."""
    return state if "kind" in state else {"kind": type(view).__name__, "pass": 0, "loader": state}


def _place_of(view: ResumableView, state: Any) -> dict[str, Any]:
    return {"kind": type(view).__name__, "world": view._world_size, "pass": 0, "loader": state}


def _opened(loader: Any) -> Iterator[Any]:
    begin_at_the_beginning(loader)
    return iter(loader)


def _opened_again(loader: Any) -> Iterator[Any]:
    """The rest of a pass. What a loader draws at its opening was drawn when the pass began: not a second time."""
    with isolated():
        return iter(loader)
