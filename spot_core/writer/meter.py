"""On the way of a big object's bytes: not faster than allowed, and now and then a word on how far it is."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeAlias

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.store import BlobSource

Tell: TypeAlias = Callable[[int, int, float], None]
"""Bytes on their way so far, bytes in all, seconds since the first."""

TELL_S = 30.0


class Throttle:
    """Lets `bytes_s` pass, for all objects of one writer together; None: everything at once. Thread safe."""

    def __init__(self, bytes_s: float | None, clock: Clock = SYSTEM_CLOCK) -> None:
        self.bytes_s = bytes_s
        self._clock = clock
        self._lock = threading.Lock()
        self._free_at = 0.0
        self._never = threading.Event()

    def take(self, nbytes: int) -> float:
        """Wait until `nbytes` more may pass; seconds waited."""
        if self.bytes_s is None:
            return 0.0
        with self._lock:
            now = self._clock.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self.bytes_s
        if start > now:
            self._never.wait(start - now)
        return start - now


class Metered:
    """A `BlobSource` whose chunks are counted and held back on their way out."""

    def __init__(
        self,
        source: BlobSource,
        throttle: Throttle,
        tell: Tell | None = None,
        *,
        clock: Clock = SYSTEM_CLOCK,
        every_s: float = TELL_S,
    ) -> None:
        self._source = source
        self._throttle = throttle
        self._tell = tell
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        self._done = 0
        self._began = self._told = clock.monotonic()

    @property
    def size(self) -> int:
        return self._source.size

    @property
    def chunk_size(self) -> int:
        return self._source.chunk_size

    def chunk(self, i: int) -> memoryview:
        view = self._source.chunk(i)
        self._passes(len(view))
        return view

    def padded_chunk(self, i: int) -> memoryview | None:
        view = self._source.padded_chunk(i)
        if view is not None:
            self._passes(min(len(view), self.size - i * self.chunk_size))
        return view

    def _passes(self, nbytes: int) -> None:
        self._throttle.take(nbytes)
        with self._lock:
            self._done += nbytes
            done, now = self._done, self._clock.monotonic()
            if self._tell is None or now - self._told < self._every_s:
                return
            self._told = now
        self._tell(done, self.size, now - self._began)
