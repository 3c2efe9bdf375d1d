"""Spot tolerance for Hugging Face Accelerate: start a script by `accelerate-spot launch`, and a killed job continues.

The script stays as it is. Where its epoch loop is not recognised (`for epoch in range(...)` around a loop over a
prepared loader), one line changes: `for epoch in accelerate_spot.epochs(N):`. Counters of the script's own that end a
loop or are logged are kept by `counters = accelerate_spot.state(global_step=0)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["Accelerator", "attach", "epochs", "state"]


def attach(accelerator: Any, run: Any = None, **settings: Any) -> Any:
    """Let a run keep this accelerator's training; before `prepare`. See `accelerate_spot.attaching.attach`."""
    from accelerate_spot import attaching

    return attaching.attach(accelerator, run, **settings)


def epochs(first: Any, *more: int) -> Iterator[Any]:
    """`for epoch in epochs(N):` (or range's arguments, or a list): the epochs that are still to come.

    Everything has to be prepared and registered before it. At its end the last state is saved, as finished.
    """
    from accelerate_spot import attaching

    return attaching.current().epochs(first, *more)


def state(**initial: Any) -> Any:
    """An object whose attributes are saved and come back: `counters = state(global_step=0, best=0.0)`.

    Best after everything was prepared and registered: then they are back at once, else when the first loop begins.
    """
    from accelerate_spot import attaching

    return attaching.current().counters(**initial)


def __getattr__(name: str) -> Any:
    if name == "Accelerator":  # only now: it needs accelerate imported
        from accelerate_spot.subclass import Accelerator

        return Accelerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
