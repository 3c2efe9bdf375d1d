"""The prepared loaders: each keeps its object and reads through a view that can say where it is.

accelerate's loaders hold a DataLoader in `base_dataloader`, read it one step ahead and pass the batches on. The view
takes that DataLoader's place, so padding, placement on devices and dispatching stay accelerate's own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from accelerate_spot import _compat
from accelerate_spot.resizing import SkipOnce, moved_place
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch.position import ResumableView, resumable
from spot_core.pytorch.streams import mix

log = logging.getLogger(__name__)


class Kept:
    """One prepared loader under its view."""

    def __init__(self, loader: Any, number: int, accelerator: Any, seed: int) -> None:
        self.loader, self.number = loader, number
        self._world_size = int(accelerator.num_processes)
        base = loader.base_dataloader
        self.view: ResumableView = resumable(
            base,
            seed=mix(seed, number),
            rank=int(accelerator.process_index),
            world_size=1 if _compat.dispatches(loader) else self._world_size,
            by_index=True,
            read_ahead=True,
        )
        self._dispatched = _compat.dispatches(loader)
        self._reads_for_all = self._dispatched and not loader.split_batches
        self.view.remember(self._per_step)
        self.view.look_ahead = getattr(base, "num_workers", 0) == 0
        loader.base_dataloader = self.view
        self.live = False
        self.given = 0
        """Steps handed to the script in the present pass by this life."""
        self.passed = 0
        """Steps of the present pass that earlier lives made."""
        self.over = False
        """The saved pass had ended: the script's next loop over the loader is that pass, and there is nothing left."""
        self.resumed_inside = False
        self._inside = 0
        """The script's batches that were passed before this pass was cut anew for another number of processes."""
        self._set_order()

    @property
    def _shared_out(self) -> int:
        """Batches of the script's that one batch of the view stands for, over all processes."""
        whole = self._dispatched or _compat.splits_batches(self.loader)
        return 1 if whole else self._world_size

    @property
    def _per_step(self) -> int:
        """Batches that one step takes from the view."""
        return self._world_size if self._reads_for_all else 1

    def _set_order(self) -> None:
        """A seedable sampler's own seed differs from start to start unless the script sets one, and rank by rank."""
        sampler = _compat.seedable_sampler(self.loader)
        if sampler is not None:
            sampler.initial_seed = int(_compat.from_first(sampler.initial_seed))

    @property
    def ended(self) -> bool:
        """The pass has no further batch, or was left."""
        return not self.live or bool(self.loader.end_of_dataloader)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors; asked for at the request for the next batch."""
        fetched = max(self.view.fetched - self.given * self._per_step, 0)
        self.view.behind = 0 if self.ended else fetched
        place = self.view.state_dict()
        self.view.behind = 0
        if self.ended:
            place["ended"] = True
        sampler = _compat.seedable_sampler(self.loader)
        return {
            "place": place,
            "iteration": int(self.loader.iteration) + (1 if self.live and self.ended else 0),
            "order_seed": None if sampler is None else int(sampler.initial_seed),
            "live": self.live,
            "steps": self.passed + self.given,
            "inside": self._inside,
            "passed": self._inside + place.get("batches", 0) * self._shared_out,
        }

    def load(self, state: Mapping[str, Any], *, moved: bool) -> None:
        """The next loop over the loader goes on from there. moved: another number of processes saved it."""
        sampler = _compat.seedable_sampler(self.loader)
        if sampler is not None and state["order_seed"] is not None:
            sampler.initial_seed = state["order_seed"]
        place, self._inside, steps = state["place"], state["inside"], state["steps"]
        # Placed by index; other kinds refuse another number of processes by themselves.
        if moved and not self._dispatched and "batches_in_pass" in place:
            batches, rest = divmod(state["passed"], self._shared_out)
            steps = batches
            batches, self._inside = (0, state["passed"]) if rest else (batches, 0)
            place = moved_place(place, self.view.state_dict(), batches)
        if place.get("ended"):
            self._inside = 0
        if self._inside:
            _compat.skip_inside(self.loader, SkipOnce).skip = self._inside
        self.view.load_state_dict(place)
        self.loader.iteration = state["iteration"]
        self.over = state["live"] and bool(place.get("ended"))
        self.resumed_inside = state["live"] and not self.over
        self.passed = steps if self.resumed_inside else 0

    def steps(self, iterate: Callable[[Any], Iterator[Any]]) -> Iterator[Any]:
        """accelerate's own iteration; a pass that is taken up does not synchronise the random state again."""
        kinds = self.loader.__dict__.get("rng_types")
        if not self.resumed_inside:
            self.passed = self._inside = 0
        elif kinds is not None:
            self.loader.rng_types = None
        self.resumed_inside = False
        self.given = 0
        items = iterate(self.loader)
        first = True
        while True:
            try:
                batch = next(items)
            except StopIteration:
                return
            finally:
                if first and kinds is not None:
                    self.loader.rng_types = kinds
                first = False
            self.given += 1
            yield batch


class Loaders:
    """All prepared loaders of an accelerator, in the order in which they were prepared."""

    def __init__(self, accelerator: Any) -> None:
        self._accelerator = accelerator
        self.kept: list[Kept] = []
        self.seed = 0

    def find(self, loader: Any) -> Kept | None:
        """The loader, if it was prepared by the accelerator."""
        self.take_all()
        return next((kept for kept in self.kept if kept.loader is loader), None)

    def take_all(self) -> None:
        """Collective: take up what has been prepared since the last call."""
        for loader in _compat.loaders(self._accelerator):
            if all(kept.loader is not loader for kept in self.kept):
                self.kept.append(Kept(loader, len(self.kept), self._accelerator, self.seed))
                self._say_what_is_not_exact(loader)

    def state(self) -> list[dict[str, Any]]:
        return [kept.state() for kept in self.kept]

    def load(self, states: list[dict[str, Any]], *, moved: bool) -> None:
        self.take_all()
        if len(states) > len(self.kept):
            raise ResumeMismatchError(
                f"The run was saved with {len(states)} prepared loaders, and the script has prepared {len(self.kept)} "
                "by now. Nothing was changed.",
                hint="Prepare the same loaders before the training loop, in the same order.",
            )
        for kept, state in zip(self.kept, states, strict=False):
            kept.load(state, moved=moved)

    def position(self) -> dict[str, Any]:
        """For the manifest: passes and global sample offsets of the loaders that count samples."""
        shown = ("pass", "batches", "offset")
        places = [state["place"] for state in self.state()]
        return {"loaders": [{key: place[key] for key in shown if key in place} for place in places]}

    def _say_what_is_not_exact(self, loader: Any) -> None:
        if not self._accelerator.is_main_process:
            return
        base = loader.base_dataloader
        data, workers = getattr(base, "dataset", None), getattr(base, "num_workers", 0)
        own_state = hasattr(base, "load_state_dict") and isinstance(data, IterableDataset)
        if own_state and workers:
            log.warning(
                "a StatefulDataLoader with %d workers over an iterable data set: random draws in the workers are not "
                "repeated after a resume. Seed them by the sample in the data set, or use num_workers=0.", workers
            )
        elif isinstance(data, IterableDataset) and not _has_state(base):
            log.warning(
                "%s has no index: after a resume it is read again from its beginning up to the place, which is exact "
                "only if reading it twice gives the same. Give it state_dict and load_state_dict and set "
                "use_stateful_dataloader=True to save that time.", type(data).__name__
            )
        if _compat.dispatches(loader) and self._accelerator.num_processes > 1:
            log.warning(
                "batches are dispatched by the first process: what fills up an incomplete last step of an epoch comes "
                "from the first step after a resume, not from the epoch's first. drop_last=True, or "
                "dispatch_batches=False, is exact."
            )


def _has_state(base: Any) -> bool:
    return isinstance(base, DataLoader) and type(base).__module__.startswith("torchdata")
