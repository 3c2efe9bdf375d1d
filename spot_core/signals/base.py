"""What a source of notices is, and the part that all polling sources share: failing without dying."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.notice import Notice

logger = logging.getLogger(__name__)

STALE_S = 120.0
"""A deadline further in the past than this was not kept by the provider (EC2 leaves the old time standing) and says
nothing."""


class LookFailed(Exception):
    """The source could not look this time. Never leaves ``BaseSource.poll``; the text becomes the source's state."""


class Source(Protocol):
    """One place where a notice can appear.

    The watcher calls ``open`` once in the thread that starts it, then ``poll`` again and again in a thread of the
    source's own, waiting ``interval_s`` seconds after each, then ``close`` from any thread.
    """

    @property
    def name(self) -> str:
        """Short name, as in the list of sources (``aws``, ``sigterm``)."""

    @property
    def per_node(self) -> bool:
        """Whether one poller per machine is enough (metadata services limit requests per machine), or each rank has
        its own."""

    @property
    def interval_s(self) -> float:
        """Seconds to wait until the next ``poll``; 0 when ``poll`` itself waits."""

    @property
    def state(self) -> str:
        """One line for the log: what is watched, or why it is not."""

    def open(self) -> bool:
        """Take what is needed from the calling thread; False when the source cannot work here (``state`` says why)."""

    def poll(self) -> list[Notice]:
        """Everything the source has to say now. The same notice keeps its id.

        Never raises: a source that cannot look says so in ``state``, returns what it could see, and asks for a longer
        ``interval_s``.
        """

    def close(self) -> None:
        """Give back what ``open`` took. Idempotent; afterwards ``poll`` returns nothing."""


@runtime_checkable
class SupportsAck(Protocol):
    """A source whose platform may start early once every machine has agreed (Azure Scheduled Events)."""

    def ack(self) -> None:
        """Tell the platform to go ahead. Call it only after the joint save is committed. Never raises."""


class BaseSource(ABC):
    """A polling source: subclasses write ``look`` and may raise from it; failures are counted, logged, and waited out.

    The wait doubles with each failure in a row, from ``every_s`` up to ``backoff_cap_s``, which stays well below the
    shortest notice (Azure: 30 s).
    """

    name: str = ""
    per_node: bool = True
    every_s: float = 5.0
    backoff_cap_s: float = 8.0

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._closed = False
        self._failures = 0
        self._error = ""

    @property
    def interval_s(self) -> float:
        if not self._failures:
            return self.every_s
        # A long-polling source waits 0 s between looks, but not between failures.
        first = self.every_s or 1.0
        return float(min(max(self.backoff_cap_s, self.every_s), first * 2.0 ** min(self._failures - 1, 10)))

    @property
    def state(self) -> str:
        if self._failures:
            return f"failing ({self._failures} in a row): {self._error}"
        return self.describe()

    def describe(self) -> str:
        """The state line of a healthy source."""
        return f"every {self.every_s:g} s"

    def open(self) -> bool:
        return True

    @abstractmethod
    def look(self) -> Iterable[Notice]:
        """Yield what is announced now. May raise: what was yielded before counts."""

    def poll(self) -> list[Notice]:
        if self._closed:
            return []
        found: list[Notice] = []
        try:
            for notice in self.look():
                found.append(notice)
        except (LookFailed, OSError, ValueError) as error:
            self._failed(error)
        except Exception as error:
            # A source must outlive its own bugs: the machine may still be taken a minute later.
            if not self._failures:
                logger.exception("notice source %s has a fault; it goes on", self.name)
            self._failed(error)
        else:
            if self._failures:
                logger.info("notice source %s works again after %d failures", self.name, self._failures)
            self._failures = 0
        return found

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._error = str(error) or type(error).__name__
        if self._failures in (1, 10) or self._failures % 100 == 0:
            logger.warning(
                "notice source %s cannot look (%d in a row): %s. Trying again in %.1f s; training goes on.",
                self.name,
                self._failures,
                self._error,
                self.interval_s,
            )

    def close(self) -> None:
        self._closed = True

    def is_stale(self, deadline: float) -> bool:
        return self._clock.now() - deadline > STALE_S
