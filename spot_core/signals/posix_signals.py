"""POSIX signals, noticed while the main thread sits in C code.

A Python handler runs only when the main thread is back in the interpreter, seconds later when it waits in a
collective. The interpreter's wakeup file descriptor is written at once, from the C handler; a reader thread (the
watcher's) turns it into a notice.
"""

from __future__ import annotations

import atexit
import logging
import os
import select
import signal
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.errors import ConfigError
from spot_core.signals.base import BaseSource
from spot_core.signals.context import Context, Plugin
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

ACCEPTED = ("SIGTERM", "SIGUSR1", "SIGUSR2", "SIGINT", "SIGHUP")
RECHECK_S = 0.5
"""The flag is looked at this often even if no byte comes: another library may have taken the wakeup descriptor."""

Chain = Callable[[signal.Signals, Callable[..., Any]], bool]

# At-fork hooks cannot be taken back, so one hook serves all sources of the process.
_open_sources: weakref.WeakSet[PosixSignals] = weakref.WeakSet()
_fork_hook = False


class PosixSignals(BaseSource):
    """Turns signals into notices with a deadline ``grace_s`` after the first one.

    A second signal of the same kind changes nothing. The handler that was there before still runs, after ours, unless
    ``chain`` is False or, called with the signal and that handler when ours is installed, answers False (for a
    handler that runs a collective, say). Outside the main thread nothing can be installed: ``open`` warns and returns
    False. A forked child is given back what was there before.
    """

    per_node = False
    every_s = 0.0

    def __init__(
        self,
        names: Sequence[str] = ("SIGTERM",),
        *,
        grace_s: float = 30.0,
        chain: bool | Chain = True,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        super().__init__(clock=clock)
        unknown = [name for name in names if name not in ACCEPTED]
        if unknown or not names:
            raise ConfigError(f"cannot watch the signals {list(names)}.", hint=f"Accepted: {', '.join(ACCEPTED)}.")
        self._signals = tuple(dict.fromkeys(signal.Signals[name] for name in names))
        self.name = "+".join(s.name.lower() for s in self._signals)
        self._grace_s = grace_s
        self._chain = chain
        self._owner = -1
        self._why_off = "not opened"
        # What was there before each installation, and whether it still runs.
        self._previous: dict[int, list[tuple[Any, bool]]] = {s: [] for s in self._signals}
        self._depth: dict[int, int] = dict.fromkeys(self._signals, 0)
        self._raised: set[int] = set()
        self._noticed: set[int] = set()
        self._reader = self._writer = self._old_fd = -1
        self._reading = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._owner == os.getpid() and not self._closed

    def describe(self) -> str:
        return f"{self._grace_s:g} s from the signal" if self.is_open else f"off: {self._why_off}"

    def open(self) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self._why_off = "not started in the main thread, where alone signals can be taken"
            logger.warning("signals are not watched: %s. Other notice sources work.", self._why_off)
            return False
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._owner = os.getpid()
        self._why_off = "closed"
        self._old_fd = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for s in self._signals:
            self._install(s)
        _open_sources.add(self)
        _register_fork_hook()
        return True

    def reinstall(self) -> list[str]:
        """Take the signals again that a host has taken since (and chain to it); the names of those.

        Call it in the main thread. Raises ValueError elsewhere.
        """
        if not self.is_open:
            return []
        current = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        if current != self._writer:
            self._old_fd = current
        taken = [s for s in self._signals if signal.getsignal(s) != self._handle]
        for s in taken:
            self._install(s)
        return [s.name for s in taken]

    def _install(self, s: signal.Signals) -> None:
        before = signal.signal(s, self._handle)
        runs = callable(before) and before is not signal.default_int_handler
        if runs and callable(before):
            runs = self._chain if isinstance(self._chain, bool) else self._chain(s, before)
            if runs:
                logger.debug("%s: the earlier handler %s runs after ours", s.name, before)
            else:
                logger.info("%s: the earlier handler %s does not run any more", s.name, before)
        self._previous[s].append((before, runs))

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() == self._owner and not self._closed:
            self._raised.add(signum)
        # A host that installed itself over us calls us back from its handler: then it is the turn of the one before it.
        depth = self._depth[signum]
        stack = self._previous[signum]
        if depth >= len(stack):
            return
        before, runs = stack[-1 - depth]
        if runs:
            self._depth[signum] = depth + 1
            try:
                before(signum, frame)
            finally:
                self._depth[signum] = depth
        elif self._closed and before is not signal.SIG_IGN and signal.getsignal(signum) == self._handle:
            # Closed outside the main thread, which could not restore the handler: do it now, and let the signal do
            # its work.
            signal.signal(signum, signal.SIG_DFL if before is None else before)
            os.kill(os.getpid(), signum)

    def look(self) -> Iterable[Notice]:
        with self._reading:
            if not self.is_open:
                return
            ready, _, _ = select.select([self._reader], [], [], RECHECK_S)
            arrived = set(os.read(self._reader, 4096)) if ready else set()
        if arrived and self._old_fd >= 0:
            self._pass_on(bytes(sorted(arrived - {0})))
        for s in self._signals:
            if s in self._noticed or not (s in arrived or s in self._raised):
                continue
            self._noticed.add(s)
            name = s.name.lower()
            yield Notice(
                f"signal:{name}", NoticeKind.PREEMPTION, name, self._clock.now() + self._grace_s, f"{s.name} received"
            )

    def _pass_on(self, arrived: bytes) -> None:
        """Give the bytes to whoever had the wakeup descriptor before (asyncio)."""
        try:
            os.write(self._old_fd, arrived)
        except OSError:
            logger.debug("the earlier wakeup descriptor is gone")
            self._old_fd = -1

    def close(self) -> None:
        if self._closed or not self.is_open:
            super().close()
            return
        super().close()
        _open_sources.discard(self)
        if threading.current_thread() is not threading.main_thread():
            # Handlers and the wakeup descriptor belong to the main thread. Both stay, and only pass on.
            logger.debug("signals closed outside the main thread: the handlers stay and pass on")
            return
        self._give_back()
        os.write(self._writer, b"\0")
        with self._reading:
            os.close(self._writer)
            os.close(self._reader)

    def _give_back(self) -> None:
        for s in self._signals:
            # A host that took the signal after us keeps it; its chain ends at ours, which passes on.
            if signal.getsignal(s) == self._handle and self._previous[s]:
                before, _ = self._previous[s].pop()
                signal.signal(s, signal.SIG_DFL if before is None else before)
        current = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(self._old_fd if current == self._writer else current, warn_on_full_buffer=False)

    def _forget_in_child(self) -> None:
        """In a forked child: nothing of ours stays, so that it can be terminated and writes nothing to the parent's
        pipe."""
        self._give_back()
        signal.set_wakeup_fd(-1)
        self._closed = True
        os.close(self._reader)
        os.close(self._writer)


def ignore_at_exit() -> None:
    """From the interpreter's exit on, take no notice of SIGTERM and the signals of open sources any more.

    For a process that leaves because it was told to: its sources are closed by then, and being told once more (by a
    launcher that sees its peer leave first) would cut its exit short and replace its exit code.
    """
    watched = {s for source in _open_sources for s in source._signals}
    atexit.register(_ignore, frozenset({signal.SIGTERM, *watched}))


def _ignore(signals: frozenset[signal.Signals]) -> None:
    for s in signals:
        signal.signal(s, signal.SIG_IGN)


def _register_fork_hook() -> None:
    global _fork_hook
    if not _fork_hook:
        os.register_at_fork(after_in_child=_in_child)
        _fork_hook = True


def _in_child() -> None:
    for source in list(_open_sources):
        _open_sources.discard(source)
        source._forget_in_child()


def _make(context: Context) -> list[PosixSignals]:
    names = context.argument.split("+") if context.argument else ["SIGTERM"]
    return [PosixSignals([name.upper() for name in names], grace_s=context.grace_s, clock=context.clock)]


PLUGIN = Plugin("signals", _make, lambda context: "here", per_node=False)
