"""Passes the launcher's signals on to its workers, as often as they come, and ends what is left after the grace.

torch's agent answers a signal by raising in its own main thread: a second one breaks its orderly shutdown, a third
one makes it leave its workers behind, and one it does not know kills it at once. Here the signals are blocked in the
whole process and one thread takes them from the kernel (sigwaitinfo(2)), so nothing is ever raised into the middle of
the agent unless there is no worker to pass a signal on to.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
from collections.abc import Iterable
from types import FrameType
from typing import NoReturn

import psutil

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.launch.exit_code import FAILED

_log = logging.getLogger(__name__)

# Told to leave: the grace runs from the first of these.
STOPPING = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT})
# Passed on without a clock: what they mean is the workers' affair (Slurm's `--signal=USR1@120` is a notice).
MESSAGES = frozenset({signal.SIGUSR1, signal.SIGUSR2})
# With no worker left, the agent is given so long to end by itself before it is interrupted, and so long after that
# (it may sit in a connect) before the process is ended.
LEAVE_S = 5.0


class LauncherSignal(BaseException):
    """Raised in the main thread when a signal comes while there is no worker to pass it on to.

    No `Exception`: it is raised wherever the main thread is, often in an import that tries what is installed and takes
    any exception for "it is not".
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"{signal.Signals(signum).name} while no worker was running")
        self.signum = signum


class Supervisor:
    """Takes over the signals of this process; one per process, made in the main thread before other threads start.

    Threads that exist before `start()` (a maths library's pool) keep their own signal mask and could take a signal
    from under it, so start it before torch is imported.
    """

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._signals: set[signal.Signals] = set()
        self._kill_after_s: float | None = None
        self._agent_stops_workers = False
        self._kill_at: float | None = None
        self._interrupt_at: float | None = None
        self._exit_at: float | None = None
        self._finished = threading.Event()
        self.stop_signal: signal.Signals | None = None  # the first signal that told this launcher to stop

    @property
    def blocked(self) -> frozenset[signal.Signals]:
        """The signals taken over; a worker inherits them blocked and has to open them again."""
        return frozenset(self._signals)

    def start(self) -> None:
        """Block the signals and start passing them on. One that the parent ignores (nohup) stays ignored."""
        wanted = STOPPING | MESSAGES
        self._signals = {s for s in wanted if signal.getsignal(s) is not signal.SIG_IGN}
        for each in self._signals:
            signal.signal(each, _raise_in_main_thread)
        signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        threading.Thread(target=self._serve, name="spot-launch-signals", daemon=True).start()

    def configure(self, *, kill_after_s: float, agent_stops_workers: bool) -> None:
        """Set what the command line says.

        kill_after_s: seconds from the first stopping signal to the SIGKILL of workers that are still there.
        agent_stops_workers: let the agent itself pass a stopping signal on. It then does not report how the workers
            ended, but it does not restart them either, as it would when they just ended (`--max-restarts`).
        """
        self._kill_after_s = kill_after_s
        self._agent_stops_workers = agent_stops_workers

    def check(self) -> None:
        """Before workers are started: raises the LauncherSignal of a stopping signal that came and was swallowed."""
        if self.stop_signal is not None:
            raise LauncherSignal(self.stop_signal)

    def finish(self) -> None:
        """The agent has ended: from here on signals are noted in the log and change nothing any more."""
        self._finished.set()

    def _serve(self) -> None:
        while True:
            wait_s = self._next_timeout()
            if wait_s is None:
                info = signal.sigwaitinfo(self._signals)
            else:
                timed = signal.sigtimedwait(self._signals, wait_s)
                if timed is None:
                    self._time_is_up()
                    continue
                info = timed
            self._received(signal.Signals(info.si_signo))

    def _next_timeout(self) -> float | None:
        times = [at for at in (self._kill_at, self._interrupt_at, self._exit_at) if at is not None]
        return max(0.0, min(times) - self._clock.monotonic()) if times and not self._finished.is_set() else None

    def _received(self, signum: signal.Signals) -> None:
        if self._finished.is_set():
            _log.info("%s: already leaving", signum.name)
            return
        stopping = signum in STOPPING
        first = stopping and self.stop_signal is None
        if first:
            self.stop_signal = signum
            if self._kill_after_s is not None:
                self._kill_at = self._clock.monotonic() + self._kill_after_s
        workers = worker_groups()
        if not workers:
            _log.warning("%s: no worker is running, nobody to pass it on to", signum.name)
            if first:
                self._interrupt()
            elif stopping and self._interrupt_at is None and self._exit_at is None:
                # The workers were told and have gone: the agent is about to say how, do not spoil it.
                self._interrupt_at = self._clock.monotonic() + LEAVE_S
        elif first and self._agent_stops_workers:
            _raise_python_handler(signum)
        else:
            _log.warning("%s: passed on to %d workers", signum.name, len(workers))
            _signal_groups(workers, signum)

    def _interrupt(self) -> None:
        self._interrupt_at = None
        self._exit_at = self._clock.monotonic() + LEAVE_S
        _raise_python_handler(self.stop_signal or signal.SIGTERM)

    def _time_is_up(self) -> None:
        now = self._clock.monotonic()
        if self._kill_at is not None and now >= self._kill_at:
            self._kill_at = None
            workers = worker_groups()
            if workers:
                _log.error("%d workers still there after %g s: SIGKILL", len(workers), self._kill_after_s)
                _signal_groups(workers, signal.SIGKILL)
        if self._interrupt_at is not None and now >= self._interrupt_at:
            self._interrupt()
        if self._exit_at is not None and now >= self._exit_at:
            self._exit_at = None
            if not self._finished.is_set() and not worker_groups():
                _log.error("the agent did not leave in %g s: ending the process", LEAVE_S)
                logging.shutdown()
                os._exit(FAILED)


def worker_groups() -> list[int]:
    """Process groups of the workers: the children that lead a session of their own, as torch starts them."""
    groups = []
    for child in psutil.Process().children():
        try:
            if child.status() != psutil.STATUS_ZOMBIE and os.getsid(child.pid) == child.pid:
                groups.append(child.pid)
        except (psutil.NoSuchProcess, ProcessLookupError):
            continue
    return groups


def _signal_groups(groups: Iterable[int], signum: signal.Signals) -> None:
    for group in groups:
        try:
            os.killpg(group, signum)
        except ProcessLookupError:
            _log.debug("worker group %d ended before %s reached it", group, signum.name)


def _raise_python_handler(signum: signal.Signals) -> None:
    """Run the Python handler of `signum` in the main thread, though every thread blocks the signal."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signum})
    signal.raise_signal(signum)
    signal.pthread_sigmask(signal.SIG_BLOCK, {signum})


def _raise_in_main_thread(signum: int, frame: FrameType | None) -> NoReturn:
    raise LauncherSignal(signum)
