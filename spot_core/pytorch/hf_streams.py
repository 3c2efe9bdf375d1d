"""Streams of Hugging Face's `datasets`: what their state leaves out, and what it does not forget.

`IterableDataset.state_dict` names the example that comes next. It leaves out the content of a shuffle buffer, so that a
stream that is put at that place loses the examples in there. And a stream that was put at a place begins *every* pass
there, until its epoch changes.
"""

from __future__ import annotations

from typing import Any

from spot_core.pytorch._private import holds_examples_back

__all__ = ["begin_at_the_beginning", "states_are_not_whole"]


def states_are_not_whole(loader: Any) -> bool:
    """Whether this loader, which has a state, would go on with other samples than those it was about to give."""
    data = getattr(loader, "dataset", None)
    if not _is_stream(data):
        return False
    # Workers that are kept keep the place that they were put at, too.
    return holds_examples_back(data) or bool(getattr(loader, "persistent_workers", False))


def begin_at_the_beginning(loader: Any) -> None:
    """Before a pass that is not taken up in the middle. (A worker's copy is made anew for each pass.)"""
    data: Any = getattr(loader, "dataset", None)
    if _is_stream(data):
        data.load_state_dict(None)


def _is_stream(data: Any) -> bool:
    """By name, so that nothing is imported for those who do not use it."""
    return any(f"{kind.__module__}.{kind.__name__}" == "datasets.iterable_dataset.IterableDataset"
               for kind in type(data).__mro__)
