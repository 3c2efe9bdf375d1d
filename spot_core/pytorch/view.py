"""A view of a loader: the same batches and attributes, and a place in them that can be saved and loaded."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from spot_core.errors import ResumeMismatchError, TopologyError
from spot_core.pytorch.streams import CpuRng, isolated

_WHAT = {
    "IndexedView": "a DataLoader of a map-style data set (placed by index)",
    "ReplayView": "a loader without an index (read again up to the place)",
    "DirectView": "a loader with a state_dict of its own and a length",
    "StatefulView": "a loader with a state_dict of its own and no length",
}
"""Kinds of views, by class name, as the user knows them."""

_HISTORY = 4  # places kept at first: most trainers fetch a batch or two ahead of the one they train on


class ResumableView:
    """What all views share: they look like the loader they show, count what was fetched and know their last places.

    `behind` is the number of fetched batches that the trainer has not consumed (it looked ahead); `state_dict` then
    tells the place before them. With `look_ahead` the states of the CPU generators before each fetch are kept too:
    a batch that was fetched early must be fetched again under the generators it saw the first time.
    `fetched` counts the batches handed out since the last `iter`.
    """

    _own = frozenset(
        {"_loader", "_pending", "_places", "_reseed", "behind", "look_ahead", "_pass", "_inner", "_iterator"}
        | {"_seed", "_rank", "_world_size", "_opening", "fetched", "_inherited", "_deal"}
    )

    def __init__(self, loader: Any, *, world_size: int = 1) -> None:
        self._loader = loader
        self._world_size = world_size
        self._pending: Mapping[str, Any] | None = None
        self._reseed: tuple[CpuRng, int] | None = None
        self._places: deque[tuple[dict[str, Any], CpuRng | None]] = deque(maxlen=_HISTORY)
        self.behind = 0
        self.look_ahead = False
        self.fetched = 0

    def remember(self, batches: int) -> None:
        """Keep enough places for a trainer that fetches up to `batches` ahead of the one it trains on (2 at first)."""
        self._places = deque(self._places, maxlen=max(batches + 2, _HISTORY))

    @property
    def splits(self) -> int:
        """Batches per global batch: more than 1 where the ranks are fewer than those whose batches are dealt."""
        return 1

    @property
    def weight(self) -> float:
        """What the mean loss of the last batch is to be multiplied with (see `deal.Hand`)."""
        return 1.0

    @property
    def batches_left(self) -> int | None:
        """To the end of this pass; None where that is not known."""
        return None

    @property  # type: ignore[misc]
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
        self.fetched = 0
        stream, early = self._reseed or (None, 0)
        self._reseed = None
        return self._count(items, stream, early)

    def _count(self, items: Iterator[Any], stream: CpuRng | None, early: int) -> Iterator[Any]:
        """Yields the batches, noting the place after each; the first `early` ones are fetched under `stream`."""
        while True:
            before = CpuRng.capture() if self.look_ahead else None
            try:
                if stream is not None:
                    before, early = stream, early - 1
                    with isolated(stream):
                        batch = next(items)
                        stream = CpuRng.capture() if early > 0 else None
                else:
                    batch = next(items)
            except StopIteration:
                return
            self.fetched += 1
            self._note(self._advance(), before)
            yield batch

    def _note(self, place: dict[str, Any], before: CpuRng | None = None) -> None:
        self._places.append((place, before))

    def state_dict(self) -> dict[str, Any]:
        """The place after the last consumed batch; plain values and tensors."""
        if self._pending is not None:
            return dict(self._pending)
        if not self._places:
            return {"kind": type(self).__name__, "world": self._world_size, "pass": -1, **self._identity()}
        at = max(len(self._places) - 1 - self.behind, 0)
        state = dict(self._places[at][0])
        if self.behind and at + 1 < len(self._places):
            before = self._places[at + 1][1]
            if before is not None:
                state["rng_before_next"] = before.to_state()
                state["ahead"] = self.behind
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The next `iter` goes on from this place; with `ended` set, at the beginning of the pass after it.

        Raises ResumeMismatchError for a place inside a pass of a loader of another kind, TopologyError for one that
        another number of ranks saved, where only as many can find it again.
        """
        self._check_kind(state)
        self._check_world(state)
        self._pending = dict(state)
        rng = state.get("rng_before_next")
        self._reseed = None if rng is None else (CpuRng.from_state(rng), state.get("ahead", 1))

    def _take_pending(self) -> Mapping[str, Any] | None:
        """The place to open at. Of another kind's only the number of the pass can be used, at a pass's beginning."""
        pending, self._pending = self._pending, None
        if pending is None or pending["kind"] == type(self).__name__:
            return pending
        return {**pending, "ended": True} if pending["pass"] >= 0 and "seed" in pending else None

    def _check_kind(self, state: Mapping[str, Any]) -> None:
        saved, mine = str(state.get("kind", "unknown")), type(self).__name__
        # Between two passes nothing of the coming one was seen: any loader may serve it.
        if saved == mine or state.get("ended") or state.get("pass", 0) < 0:
            return
        raise ResumeMismatchError(
            f"The place in the data was saved for {_WHAT.get(saved, 'a loader that is not known here')}, and the "
            f"loader is now a {type(self._loader).__name__}, {_WHAT[mine]}: it cannot be put at that place, and "
            "beginning again would train on samples of this epoch twice.",
            hint="Give the kind of loader and data set that the run was started with; to change it, start a run of its "
            "own (another run folder) from exported weights.",
        )

    def _check_world(self, state: Mapping[str, Any]) -> None:
        saved = state.get("world", self._world_size)
        if saved == self._world_size or state.get("ended") or state.get("pass", 0) < 0:
            return
        raise TopologyError(
            f"The place in the data was saved by {saved} ranks, and there are {self._world_size} now. What each of "
            f"them had read of {_WHAT[type(self).__name__]} is known to itself only and cannot be shared out anew.",
            hint=f"Start {saved} ranks, resume from the end of an epoch, or give a map-style data set.",
        )

    def _identity(self) -> dict[str, Any]:
        return {}

    def _open(self) -> Iterator[Any]:
        raise NotImplementedError

    def _advance(self) -> dict[str, Any]:
        raise NotImplementedError
