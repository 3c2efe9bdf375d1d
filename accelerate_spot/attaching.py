"""Putting an `Accelerator` under the run: by the hook, by hand, or as a subclass; one per process."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

from accelerate_spot import _compat, refusals
from accelerate_spot.job import Job
from accelerate_spot.section import Section
from spot_core.errors import ConfigError

_job: Job | None = None


def attach(accelerator: Any, run: str | os.PathLike[str] | None = None, **settings: Any) -> Any:
    """Let the run keep this accelerator's training; returns the accelerator. Before `prepare`.

    run, settings: as in `spot_config`, see `accelerate_spot.section`; what is not given comes from the environment.

    Raises ConfigError for what does not fit together, and for a second accelerator.
    """
    global _job
    if _job is not None:
        if _job.accelerator is accelerator:
            return accelerator
        raise ConfigError(
            "a second Accelerator in one process: the run can keep one training only.",
            hint="Make one Accelerator and pass it on; for what is no training, make it inside "
            "accelerate_spot.activation.left_alone().",
        )
    job = Job(accelerator, Section.active(run, **settings))
    _watch_classes()
    _refuse_uneven(accelerator)
    _finish_with_training(accelerator, job)
    _order_alike(accelerator)
    _notice_accumulation(accelerator, job)
    _job = job
    return accelerator


def attached() -> bool:
    return _job is not None


def current() -> Job:
    """The job of this process. Raises ConfigError when there is none."""
    if _job is None:
        raise ConfigError(
            "no Accelerator is attached to a run.",
            hint="Start the script by `accelerate-spot launch`, use accelerate_spot.Accelerator, or call "
            "accelerate_spot.attach(accelerator).",
        )
    return _job


def _watch_classes() -> None:
    """Loaders and optimizers are watched through their classes: an instance cannot replace its `__iter__`."""
    for cls in _compat.loader_classes():
        original = cls.__iter__
        if hasattr(original, "__wrapped_by_spot__"):
            continue

        @functools.wraps(original)
        def __iter__(self: Any, original: Any = original) -> Iterator[Any]:
            return original(self) if _job is None else _job.steps(self, original)

        __iter__.__wrapped_by_spot__ = True  # type: ignore[attr-defined]
        cls.__iter__ = __iter__
    cls = _compat.optimizer_class()
    step = cls.step
    if not hasattr(step, "__wrapped_by_spot__"):

        @functools.wraps(step)
        def watched(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = step(self, *args, **kwargs)
            if _job is not None and self.gradient_state.sync_gradients:
                _job.stepped(self)
            return result

        watched.__wrapped_by_spot__ = True  # type: ignore[attr-defined]
        cls.step = watched


def _refuse_uneven(accelerator: Any) -> None:
    original = accelerator.join_uneven_inputs

    @functools.wraps(original)
    def join_uneven_inputs(joinables: Any, even_batches: bool | None = None) -> Any:
        refusals.check_even_batches(accelerator, even_batches is not False)
        return original(joinables, even_batches=even_batches)

    accelerator.join_uneven_inputs = join_uneven_inputs


def _finish_with_training(accelerator: Any, job: Job) -> None:
    original = accelerator.end_training

    @functools.wraps(original)
    def end_training(*args: Any, **kwargs: Any) -> Any:
        job.left()
        job.close()  # accelerate takes the process group down next
        return original(*args, **kwargs)

    accelerator.end_training = end_training


def _order_alike(accelerator: Any) -> None:
    """A shuffled order that does not depend on the number of processes: the view's own stream decides it."""
    original = accelerator.prepare_data_loader

    @functools.wraps(original)
    def prepare_data_loader(data_loader: Any, *args: Any, **kwargs: Any) -> Any:
        own = _compat.own_generator(data_loader)
        prepared = original(data_loader, *args, **kwargs)
        if not own:
            _compat.forget_generator(prepared)
        return prepared

    accelerator.prepare_data_loader = prepare_data_loader


def _notice_accumulation(accelerator: Any, job: Job) -> None:
    original = accelerator.accumulate

    @functools.wraps(original)
    def accumulate(*models: Any) -> Any:
        job.accumulates = True
        return original(*models)

    accelerator.accumulate = accumulate
