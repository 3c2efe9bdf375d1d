"""Another number of processes than before: the same global batch, the same learning rates by update.

Each process takes batches of the script's size, so that fewer processes keep the global batch by accumulating more
often. accelerate steps a scheduler once per process and update; a run keeps the number it began with.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from accelerate_spot import _compat
from spot_core.errors import TopologyError
from spot_core.pytorch.deal import origin_of

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class GlobalBatch:
    """What one update is made of, and what the script asks for now."""

    origin: int
    """Processes whose global batch, and whose steps of the scheduler, the run keeps."""
    accumulation: int
    """Of those processes."""
    scripted: int
    """gradient_accumulation_steps that the script gave to this life."""

    @classmethod
    def of(cls, accelerator: Any) -> GlobalBatch:
        accumulation = _compat.accumulation(accelerator)
        return cls(int(accelerator.num_processes), accumulation, accumulation)

    def to_state(self) -> dict[str, int]:
        return asdict(self)

    def taken_up(self, accelerator: Any, *, saved_by: int, on_resize: str, accumulates: bool) -> GlobalBatch:
        """The one of this life, set in the accelerator; `saved_by` processes left it.

        accumulates: whether the script trains under `accelerator.accumulate`, without which nothing can be added up.
        Raises TopologyError when it cannot be kept.
        """
        present = GlobalBatch.of(accelerator)
        world = present.origin
        origin = origin_of(on_resize, saved=saved_by, world=world, origin=self.origin)
        if world == saved_by and present.scripted != self.scripted:
            log.warning(
                "spot: gradient_accumulation_steps was %d and is %d: the global batch changes with it",
                self.scripted, present.scripted,
            )
            return present
        if origin != self.origin:
            return present
        micro_batches = self.origin * self.accumulation
        if accelerator.split_batches:  # the script's batch is the global one, for any number of processes
            return GlobalBatch(self.origin, self.accumulation, present.scripted)
        wanted, rest = divmod(micro_batches, world)
        if rest or (wanted != present.accumulation and not accumulates):
            why = (
                f"{micro_batches} batches make an update, which {world} processes cannot share out evenly"
                if rest
                else "the script does not train inside `with accelerator.accumulate(model)`"
            )
            raise TopologyError(
                f"The run was begun by {self.origin} processes, and {world} cannot keep its global batch: {why}.",
                hint=f"Start a number of processes that divides {micro_batches}, or accept another global batch "
                "(on_resize: accept).",
            )
        if wanted != present.accumulation:
            log.warning("spot: gradient_accumulation_steps is %d instead of %d, to keep the global batch of %d "
                        "processes", wanted, present.accumulation, self.origin)
            accelerator.gradient_accumulation_steps = wanted
        if self.origin != world:
            keep_scheduler_steps(accelerator, self.origin)
        return GlobalBatch(self.origin, self.accumulation, present.scripted)


def keep_scheduler_steps(accelerator: Any, processes: int) -> None:
    """Let each update step the schedulers as often as under so many processes."""
    for scheduler in _compat.schedulers(accelerator):
        if not scheduler.split_batches and scheduler.step_with_optimizer:
            scheduler.split_batches = True  # one step by itself, `processes` of them by us
            scheduler.step = functools.partial(_steps, scheduler, scheduler.step, processes)


def _steps(scheduler: Any, step: Any, times: int, *args: Any, **kwargs: Any) -> None:
    if not scheduler.gradient_state.sync_gradients:
        step(*args, **kwargs)
        return
    for _ in range(times):
        if not _compat.schedule_is_over(scheduler):
            step(*args, **kwargs)


class SkipOnce:
    """A batch sampler that leaves out the first batches of one pass: they were seen by other processes' shares."""

    def __init__(self, batch_sampler: Any) -> None:
        self.batch_sampler = batch_sampler
        self.skip = 0

    def __getattr__(self, name: str) -> Any:
        if name == "batch_sampler":
            raise AttributeError(name)
        return getattr(self.batch_sampler, name)

    def __len__(self) -> int:
        return len(self.batch_sampler)

    def __iter__(self) -> Iterator[Any]:
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(self.batch_sampler):
            if number >= skip:
                yield batch
