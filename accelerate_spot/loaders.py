"""The prepared loaders of a script: where each of them stands, and what of a pass earlier lives have been through."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch.utils.data import IterableDataset

from accelerate_spot import _compat
from accelerate_spot.reading import Reading, moved
from accelerate_spot.resizing import SkipOnce
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch.streams import mix

log = logging.getLogger(__name__)


class Kept(Reading):
    """One prepared loader under its view."""

    def __init__(self, loader: Any, number: int, accelerator: Any, seed: int) -> None:
        self._world_size = int(accelerator.num_processes)
        super().__init__(
            loader, seed=mix(seed, number), rank=int(accelerator.process_index), world_size=self._world_size
        )
        self.number = number
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

    @property
    def _shared_out(self) -> int:
        """Batches of the script's that one batch of the view stands for, over all processes."""
        whole = self.dispatched or _compat.splits_batches(self.loader)
        return 1 if whole else self._world_size

    @property
    def ended(self) -> bool:
        """The pass has no further batch, or was left."""
        return not self.live or bool(self.loader.end_of_dataloader)

    def state(self) -> dict[str, Any]:
        """Plain values and tensors; asked for at the request for the next batch."""
        place = self.place(ended=self.ended)
        if self.ended:
            place["ended"] = True
        return {
            "place": place,
            "iteration": int(self.loader.iteration) + (1 if self.live and self.ended else 0),
            "live": self.live,
            "steps": self.passed + self.given,
            "inside": self._inside,
            "passed": self._inside + place.get("batches", 0) * self._shared_out,
        }

    def load(self, state: Mapping[str, Any], *, resized: bool) -> None:
        """The next loop over the loader goes on from there. resized: another number of processes saved it."""
        place, self._inside, steps = state["place"], state["inside"], state["steps"]
        # Placed by index; other kinds refuse another number of processes by themselves.
        if resized and not self.dispatched and "batches_in_pass" in place:
            batches, rest = divmod(state["passed"], self._shared_out)
            steps = batches
            batches, self._inside = (0, state["passed"]) if rest else (batches, 0)
            place = moved(place, self.view, world_size=self._world_size, batches=batches)
        if place.get("ended"):
            self._inside = 0
        if self._inside:
            _compat.skip_inside(self.loader, SkipOnce).skip = self._inside
        self.take_up(place)
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
                self._say_what_is_not_exact(self.kept[-1])

    def state(self) -> list[dict[str, Any]]:
        return [kept.state() for kept in self.kept]

    def load(self, states: list[dict[str, Any]], *, resized: bool) -> None:
        self.take_all()
        if len(states) > len(self.kept):
            raise ResumeMismatchError(
                f"The run was saved with {len(states)} prepared loaders, and the script has prepared {len(self.kept)} "
                "by now. Nothing was changed.",
                hint="Prepare the same loaders before the training loop, in the same order.",
            )
        for kept, state in zip(self.kept, states, strict=False):
            kept.load(state, resized=resized)

    def position(self) -> dict[str, Any]:
        """For the manifest: passes and global sample offsets of the loaders that count samples."""
        shown = ("pass", "batches", "offset")
        places = [state["place"] for state in self.state()]
        return {"loaders": [{key: place[key] for key in shown if key in place} for place in places]}

    def _say_what_is_not_exact(self, kept: Kept) -> None:
        if not self._accelerator.is_main_process:
            return
        base = kept.base
        data, workers = getattr(base, "dataset", None), getattr(base, "num_workers", 0)
        own_state = hasattr(base, "load_state_dict")
        if isinstance(data, IterableDataset) and own_state and workers:
            log.warning(
                "a StatefulDataLoader with %d workers over an iterable data set: random draws in the workers are not "
                "repeated after a resume. Seed them by the sample in the data set, or use num_workers=0.", workers
            )
        elif isinstance(data, IterableDataset) and not own_state:
            log.warning(
                "%s has no index: after a resume it is read again from its beginning up to the place, which is exact "
                "only if reading it twice gives the same. Give it state_dict and load_state_dict and set "
                "use_stateful_dataloader=True to save that time.", type(data).__name__
            )
        if kept.dispatched and self._accelerator.num_processes > 1:
            log.warning(
                "batches are dispatched by the first process: what fills up an incomplete last step of an epoch comes "
                "from the first step after a resume, not from the epoch's first. drop_last=True, or "
                "dispatch_batches=False, is exact."
            )
