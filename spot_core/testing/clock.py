"""Time that a test turns by hand."""

from __future__ import annotations

__all__ = ["FakeClock"]


class FakeClock:
    """A `Clock` that stands still until it is advanced."""

    def __init__(self, now: float = 1_700_000_000.0) -> None:
        self._now = now
        self._monotonic = 0.0

    def now(self) -> float:
        return self._now

    def monotonic(self) -> float:
        return self._monotonic

    def advance(self, seconds: float) -> None:
        """Both clocks go on by `seconds`, which must not be negative."""
        if seconds < 0:
            raise ValueError("time does not go back")
        self._now += seconds
        self._monotonic += seconds
