"""What a script has outside of prepared objects: how often its epoch loop has run, and counters of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

_DONE = 2**62  # more than any loop has


class Counters(SimpleNamespace):
    """Values of the script's own, as attributes: numbers, strings, lists, tensors."""


class Loops:
    """The epoch loops of a script, in the order in which it comes by them, and its counters."""

    def __init__(self) -> None:
        self._at: list[int] = []  # by loop: how many of its items are done
        self._saved: list[int] = []
        self._counters: list[Counters] = []
        self._saved_counters: list[dict[str, Any]] | None = None
        self.finished = False
        """The last loop that was begun is over, and everything of it is saved."""

    @property
    def known(self) -> bool:
        """Whether the script says where it is: by `epochs`, or by counters of its own."""
        return bool(self._at or self._counters)

    def epochs(
        self, items: Sequence[Any], begin: Callable[[], None], end: Callable[[], None], nothing: Callable[[], None]
    ) -> Iterator[Any]:
        """The items that are still to come.

        `begin` is called before the first, `end` after the last, `nothing` when all were done in an earlier life.
        """
        begin()
        number = len(self._at)
        start = self._saved[number] if number < len(self._saved) else 0
        self._at.append(start)
        self.finished = False
        for index in range(start, len(items)):
            self._at[number] = index
            yield items[index]
        self._at[number] = max(len(items), start)
        if start < len(items):
            end()
        else:
            nothing()

    def counters(self, initial: Mapping[str, Any]) -> Counters:
        number = len(self._counters)
        values = dict(initial)
        if self._saved_counters is not None and number < len(self._saved_counters):
            values |= self._saved_counters[number]
        self._counters.append(Counters(**values))
        return self._counters[-1]

    def leave(self) -> None:
        """The last loop was left early by the script itself: it is done."""
        if self._at:
            self._at[-1] = _DONE

    def state(self) -> dict[str, Any]:
        return {"at": list(self._at), "counters": [dict(vars(each)) for each in self._counters]}

    def load(self, state: Mapping[str, Any]) -> None:
        self._saved = list(state["at"])
        self._saved_counters = [dict(each) for each in state["counters"]]
        for counters, saved in zip(self._counters, self._saved_counters, strict=False):
            vars(counters).update(saved)


def as_items(first: Any, *more: int) -> Sequence[Any]:
    """What `epochs` was given: a number, the arguments of `range`, or the items themselves."""
    if isinstance(first, int):
        return range(first, *more)
    if isinstance(first, Sequence):
        return first
    if isinstance(first, Iterable):
        return list(first)
    raise TypeError(f"epochs() takes a number, range's arguments, or the items of the loop, not {first!r}")
