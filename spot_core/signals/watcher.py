"""One thread per source; what they say is joined here: same id once, earliest deadline counts, cancelled is
forgotten."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Sequence
from types import TracebackType

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import Source, SupportsAck
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

JOIN_S = 1.0


class Watcher:
    """Runs sources and keeps the notices that hold.

    ``on_notice`` is called in a source's thread, once for each notice that becomes current, again if its deadline moves
    earlier, and with kind CANCELLED when a current one is taken back; it must be short. ``arrived`` is set while any
    notice is current. With a finite ``horizon_s`` a stopping notice with a deadline further away (maintenance in five
    days, a job's time limit) is logged and held until it comes near, for listeners that can only stop or go on.

    Start it in the main thread when a source takes signals. In a forked child it does nothing: threads are not
    inherited.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        clock: Clock = SYSTEM_CLOCK,
        horizon_s: float = math.inf,
        on_notice: Callable[[Notice], None] | None = None,
    ) -> None:
        self.sources = tuple(sources)
        self.arrived = threading.Event()
        self._clock = clock
        self._horizon_s = horizon_s
        self._on_notice = on_notice
        self._lock = threading.Lock()
        self._known: dict[str, Notice] = {}
        self._current: set[str] = set()
        self._stopping = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Open all sources in this thread and start polling. Raises only what a source's ``open`` raises for a wrong
        setting."""
        for source in self.sources:
            if source.open():
                thread = threading.Thread(
                    target=self._run, args=(source,), name=f"spot-notice-{source.name}", daemon=True
                )
                self._threads.append(thread)
                thread.start()
        logger.info("notice sources: %s", "; ".join(self.states()) or "none")

    def states(self) -> list[str]:
        """One line per source: its name and what it is doing."""
        return [f"{source.name} ({source.state})" for source in self.sources]

    def current(self) -> tuple[Notice, ...]:
        """The notices that hold and are near, earliest deadline first."""
        with self._lock:
            found = [self._known[identity] for identity in self._current]
        return tuple(sorted(found, key=lambda n: (n.deadline is None, n.deadline or 0.0)))

    def held(self) -> tuple[Notice, ...]:
        """The notices whose deadline is still beyond the horizon."""
        with self._lock:
            return tuple(notice for identity, notice in self._known.items() if identity not in self._current)

    def deadline(self) -> float | None:
        """The earliest deadline (unix seconds) of the current notices that stop training; None when there is none."""
        deadlines = [n.deadline for n in self.current() if n.stops and n.deadline is not None]
        return min(deadlines, default=None)

    def acknowledge(self) -> None:
        """Tell the platforms that can be told that they may go ahead. Only after the joint save is committed."""
        for source in self.sources:
            if isinstance(source, SupportsAck):
                source.ack()

    def poll_once(self) -> tuple[Notice, ...]:
        """Open every source and look once, in this thread, instead of `start`; the current notices."""
        for source in self.sources:
            if source.open():
                self._look(source)
        return self.current()

    def _run(self, source: Source) -> None:
        while not self._stopping.is_set():
            pause_s = self._look(source)
            self._stopping.wait(pause_s)

    def _look(self, source: Source) -> float:
        pause_s = 5.0
        try:
            for notice in source.poll():
                self._take(notice)
            pause_s = source.interval_s
        except Exception:
            # Third parties write sources; a fault in one must cost neither the thread nor the training.
            logger.exception("notice source %s broke its contract by raising; it goes on", source.name)
        self._release()
        return pause_s

    def _take(self, notice: Notice) -> None:
        with self._lock:
            before = self._known.get(notice.id)
            if notice.kind is NoticeKind.CANCELLED:
                if before is None:
                    return
                del self._known[notice.id]
                was_current = notice.id in self._current
                self._current.discard(notice.id)
                if not self._current:
                    self.arrived.clear()
            else:
                self._known[notice.id] = notice
        if notice.kind is NoticeKind.CANCELLED:
            logger.warning("notice %s is cancelled: %s", notice.id, notice.detail)
            if was_current:
                self._tell(notice)
        elif before is None and not self._near(notice):
            logger.warning(
                "notice %s: %s in %.0f s; held until it is near", notice.id, notice.detail, self._left(notice)
            )
        elif before is not None and notice.id in self._current and _earlier(notice, before):
            logger.warning("notice %s comes earlier: %.0f s left", notice.id, self._left(notice))
            self._tell(notice)

    def _release(self) -> None:
        """Make current what has come near. Called after every look of any source."""
        with self._lock:
            near = [n for identity, n in self._known.items() if identity not in self._current and self._near(n)]
            self._current.update(n.id for n in near)
            if near:
                self.arrived.set()
        for notice in near:
            left = "no deadline" if notice.deadline is None else f"{self._left(notice):.0f} s left"
            logger.warning(
                "notice %s (%s) from %s: %s, %s", notice.id, notice.kind.value, notice.source, notice.detail, left
            )
            self._tell(notice)

    def _near(self, notice: Notice) -> bool:
        return not notice.stops or notice.deadline is None or self._left(notice) <= self._horizon_s

    def _left(self, notice: Notice) -> float:
        return 0.0 if notice.deadline is None else notice.deadline - self._clock.now()

    def _tell(self, notice: Notice) -> None:
        if self._on_notice is None:
            return
        try:
            self._on_notice(notice)
        except Exception:
            # The listener is the caller's; the source's thread has to survive it.
            logger.exception("the listener for notices raised on %s", notice.id)

    def close(self) -> None:
        """Stop polling and give signals back. Idempotent. A thread inside a long poll is left to end by itself."""
        self._stopping.set()
        for source in self.sources:
            source.close()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(JOIN_S)
        self._threads.clear()

    def __enter__(self) -> Watcher:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _earlier(notice: Notice, before: Notice) -> bool:
    """By more than a second: some services compute the time anew for every request."""
    if notice.deadline is None:
        return False
    return before.deadline is None or notice.deadline < before.deadline - 1.0
