"""The pieces of one snapshot, copied in order by whoever has time: a background thread, and the loop once it waits."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Piece:
    copy: Callable[[], None]
    end: int | None = None
    """Where the snapshot is complete to once this piece and all before it are copied; None: no further than before."""


@dataclass
class Pieces:
    """`advance(end)` is called as the snapshot grows from its start, never going back."""

    pieces: Sequence[Piece]
    advance: Callable[[int], None]
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _taken: int = 0
    _copied: set[int] = field(default_factory=set)
    _ended: int = 0
    _whole: int = 0  # so many from the start are copied
    _error: BaseException | None = None
    _over: threading.Event = field(default_factory=threading.Event)

    def help(self) -> None:
        """Copy what nobody has begun. Raises nothing: `finish` does."""
        while (number := self._take()) is not None:
            try:
                self.pieces[number].copy()
            except BaseException as error:  # noqa: BLE001 - raised where the copies are awaited
                self._put(number, error)
            else:
                self._put(number)

    def finish(self) -> None:
        """Copy what nobody has begun and wait for the rest. Raises what a copy raised, once nobody copies any more: the
        memory may be another snapshot's then."""
        self.help()
        if self.pieces:
            self._over.wait()
        if self._error is not None:
            raise self._error

    def _take(self) -> int | None:
        with self._lock:
            if self._error is not None or self._taken == len(self.pieces):
                return None
            self._taken += 1
            return self._taken - 1

    def _put(self, number: int, error: BaseException | None = None) -> None:
        with self._lock:
            self._ended += 1
            self._error = self._error or error
            if error is None:
                self._copied.add(number)
            end: int | None = None
            while self._whole in self._copied:
                end = self.pieces[self._whole].end or end
                self._whole += 1
            if end is not None:
                try:
                    self.advance(end)
                except BaseException as lost:  # noqa: BLE001 - as in `help`
                    self._error = self._error or lost
            if self._ended == (len(self.pieces) if self._error is None else self._taken):
                self._over.set()
