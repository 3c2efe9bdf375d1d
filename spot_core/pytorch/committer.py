"""The background half of a save: every rank reports its part over the channel, rank 0 commits when all have.

No process group is used here. What a rank reports is JSON under ``save/<number>/<rank>``; saves are numbered alike on
all ranks.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import Any

from spot_core.clock import Clock
from spot_core.errors import FencedError, Reason, SaveError, SpotError, StoreError
from spot_core.generation import Open
from spot_core.layout import GenerationId
from spot_core.manifest import Part
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout
from spot_core.pytorch.outcome import Outcome, as_commit_error
from spot_core.retention import Retention
from spot_core.run import Writer

log = logging.getLogger(__name__)

_JOIN_S = 5.0


@dataclass(frozen=True)
class Patience:
    """How long to wait for what, in seconds; every wait of a session is bounded by one of these."""

    write_s: float = 1800.0
    """Rank 0's own part, from the start of the save to durable."""
    report_s: float = 120.0
    """The other ranks' reports, after rank 0's own part; at least three times what that took."""
    arrive_s: float = 600.0
    """The other ranks' coming to a save, from when rank 0 came."""
    joint_s: float = 2400.0
    """Until rank 0 comes to the same call as the others (it may be draining a save there)."""
    silent_s: float = 15.0
    """A sign of life of rank 0, while the others wait for it; launchers end them 30 s after it has died."""
    stop_s: float = 10.0
    """Meeting all ranks at a stop, beyond the deadline of the notice."""
    close_s: float = 10.0
    """Letting a save in flight finish when the session is closed without a drain."""


def report(channel: Channel, number: int, rank: int, future: Future[Part] | SpotError) -> None:
    """Tell rank 0, now or when `future` ends, how this rank's part of save `number` went."""

    def tell(ended: Future[Part] | SpotError) -> None:
        error = ended if isinstance(ended, SpotError) else ended.exception()
        if error is None and not isinstance(ended, SpotError):
            word: dict[str, Any] = {"part": ended.result().to_json()}
        else:
            word = {"error": str(error)}
        try:
            channel.set(f"save/{number}/{rank}", json.dumps(word))
        except ChannelError as lost:
            log.warning("rank %d could not report its part: %s", rank, lost)

    if isinstance(future, SpotError):
        tell(future)
    else:
        future.add_done_callback(tell)


@dataclass
class Flight:
    """A save on its way, as rank 0 sees it."""

    number: int
    step: int
    started: float
    """Monotonic seconds."""
    opened: Open
    meta: Mapping[str, Any]
    blocked_s: float = 0.0
    staged_s: float | None = None
    durable_s: float | None = None
    outcome: Outcome | None = None
    done: threading.Event = field(default_factory=threading.Event)


class Committer:
    """Rank 0's commits, one thread per save: the thread of the next one waits already, since the trainer would stand
    still for its start."""

    def __init__(
        self,
        channel: Channel,
        writer: Writer,
        retention: Retention,
        *,
        damaged: list[GenerationId],
        patience: Patience,
        clock: Clock,
        ended: Callable[[], None],
    ) -> None:
        self._channel = channel
        self.writer = writer
        self._retention = retention
        self._damaged = damaged
        self._patience = patience
        self._clock = clock
        self._ended = ended
        self._cancel = threading.Event()
        self._pruning = threading.Lock()
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._hire()

    def start(self, flight: Flight, part: Future[Part] | SpotError, staged: threading.Event) -> None:
        """Finish `flight` in the background: `flight.done` is set when its outcome is known."""
        self._work.put(lambda: self._run(flight, part, staged))

    def _hire(self) -> None:
        thread = threading.Thread(target=self._serve, name="spot-commit", daemon=True)
        self._threads = [*(one for one in self._threads if one.is_alive()), thread]
        thread.start()

    def _serve(self) -> None:
        if (run := self._work.get()) is not None:
            self._hire()
            run()

    def close(self, timeout_s: float) -> None:
        """Let commit and pruning finish within `timeout_s`, then give up waiting for other ranks."""
        self._work.put(None)
        end = self._clock.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock.monotonic()))
        self._cancel.set()

    def join(self) -> None:
        """Wait for what ends once `close` was called and the writer is closed too.

        A thread that is inside torch's store when the interpreter exits aborts the process (C++ `terminate`).
        """
        end = self._clock.monotonic() + _JOIN_S
        for thread in self._threads:
            thread.join(max(0.0, end - self._clock.monotonic()))

    def _run(self, flight: Flight, part: Future[Part] | SpotError, staged: threading.Event) -> None:
        try:
            parts = self._parts(flight, part, staged)
            written = flight.opened.seal(parts, world_size=self._channel.world_size)
            committed = written.commit(flight.meta)
            flight.durable_s = self._clock.monotonic() - flight.started
            flight.outcome = Outcome(flight.step, committed)
        except Exception as error:  # noqa: BLE001 - it is the save's outcome, which every rank hears
            flight.outcome = Outcome(flight.step, error=as_commit_error(error, f"step {flight.step}"))
        self._forget(flight.number)
        flight.done.set()
        self._ended()
        if flight.outcome.committed is not None:
            log.info("spot: generation %s committed in %.2f s", flight.opened.id, flight.durable_s)
            self._prune()

    def _parts(self, flight: Flight, own: Future[Part] | SpotError, staged: threading.Event) -> list[Part]:
        mine: Part | None = None
        failed: SpotError | None = None
        try:
            mine = self._own(flight, own, staged)
        except SpotError as error:
            failed = error
        # A failed save is over only when no rank is writing for it any more.
        others = self._others(flight)
        if failed is not None:
            raise failed
        assert mine is not None
        return [mine, *others]

    def _own(self, flight: Flight, own: Future[Part] | SpotError, staged: threading.Event) -> Part:
        if isinstance(own, SpotError):
            raise own
        limit = self._patience.write_s
        if staged.wait(limit):
            flight.staged_s = self._clock.monotonic() - flight.started
        try:
            return own.result(max(0.0, limit - (self._clock.monotonic() - flight.started)))
        except FutureTimeout:
            raise SaveError(
                f"The save of step {flight.step}: rank 0 did not finish writing within {limit:.0f} s. Earlier "
                "generations are whole."
            ) from None

    def _others(self, flight: Flight) -> list[Part]:
        ranks = range(1, self._channel.world_size)
        if not ranks:
            return []
        limit = max(self._patience.report_s, 3 * (self._clock.monotonic() - flight.started))
        keys = [f"save/{flight.number}/{rank}" for rank in ranks]
        try:
            words = [json.loads(word) for word in self._channel.wait(keys, limit, cancel=self._cancel)]
        except ChannelTimeout as late:
            names = ", ".join(map(str, late.ranks))
            raise SaveError(
                f"The save of step {flight.step}: rank {names} did not report its part within {limit:.0f} s. Earlier "
                "generations are whole.",
                reason=Reason.MISSING_RANKS,
                hint="Is that process alive?",
            ) from late
        failures = [f"rank {rank}: {word['error']}" for rank, word in zip(ranks, words, strict=True) if "error" in word]
        if failures:
            raise SaveError(f"The save of step {flight.step} failed on {'; '.join(failures)}")
        return [Part.from_json(word["part"]) for word in words]

    def _forget(self, number: int) -> None:
        try:
            self._channel.delete(f"save/{number}/{rank}" for rank in range(self._channel.world_size))
        except ChannelError as error:
            log.debug("keys of save %d are left: %s", number, error)

    def _prune(self) -> None:
        with self._pruning:
            try:
                self.writer.prune(self._retention, damaged=self._damaged)
            except (StoreError, FencedError) as error:
                # The next one goes on where this one stopped; a fence shows at the next commit.
                log.warning("spot: old generations could not be pruned: %s", error)
