"""What the threads of a write wait for: the snapshot, and what the trainer says of it later than of the job."""

from __future__ import annotations

import threading
from collections.abc import Callable

from spot_core.errors import SaveError
from spot_core.writer.job import Bases
from spot_core.writer.slab import Slab


class Gate:
    """Lets threads wait for the watermark without polling: `ring` after it moved, `abort` when it never will; for what
    base blobs the part has, which `settle` tells; and for its index, which `describe` brings.

    Every wait raises SaveError once the write was aborted, also for what is there already.
    """

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._lock = threading.Lock()
        self._waiting: list[tuple[Callable[[], bool], threading.Event]] = []
        self._failure: str | None = None
        self._bases: Bases | None = None
        self._index: Callable[[], bytes] | None = None

    def ring(self) -> None:
        # Wakes those only who can go on: the others would be in their way, since a woken thread asks for the
        # interpreter first.
        with self._lock:
            waiting, self._waiting = self._waiting, []
            for ready, turn in waiting:
                if self._over(ready):
                    turn.set()
                else:
                    self._waiting.append((ready, turn))

    def settle(self, bases: Bases) -> None:
        self._bases = bases
        self.ring()

    def describe(self, index: Callable[[], bytes]) -> None:
        self._index = index
        self.ring()

    def abort(self, why: str) -> None:
        self._failure = self._failure or why
        self.ring()

    def wait_for(self, nbytes: int) -> None:
        """Block until `nbytes` are staged."""
        self._wait(lambda: self.slab.watermark >= nbytes)

    def wait_settled(self) -> Bases:
        """Block until that is known, and the new base blob staged."""
        self._wait(lambda: self._bases is not None)
        assert self._bases is not None
        return self._bases

    def wait_described(self) -> bytes:
        """Block until the index is there; encoded on this thread."""
        self._wait(lambda: self._index is not None)
        assert self._index is not None
        return self._index()

    def _wait(self, ready: Callable[[], bool]) -> None:
        turn = threading.Event()
        with self._lock:
            if self._over(ready):
                turn.set()
            else:
                self._waiting.append((ready, turn))
        turn.wait()
        if self._failure is not None:
            raise SaveError(f"the snapshot could not be taken: {self._failure}")

    def _over(self, ready: Callable[[], bool]) -> bool:
        return self._failure is not None or ready()
