"""The only file that reads time: everything else takes a `Clock`, so that a test can turn it by hand."""

from __future__ import annotations

import time
from typing import Protocol, runtime_checkable

__all__ = ["SYSTEM_CLOCK", "Clock"]


@runtime_checkable
class Clock(Protocol):
    """What tells the time. An argument, never global."""

    def now(self) -> float:
        """Wall clock, Unix seconds. For records that people and other machines read."""

    def monotonic(self) -> float:
        """Seconds since an arbitrary origin, never going back. For durations and deadlines."""


class _SystemClock:
    def now(self) -> float:
        return time.time()

    def monotonic(self) -> float:
        return time.monotonic()

    def __repr__(self) -> str:
        return "SYSTEM_CLOCK"


SYSTEM_CLOCK: Clock = _SystemClock()
