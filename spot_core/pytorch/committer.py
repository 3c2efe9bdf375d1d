"""The background half of a save: every rank reports its part over the channel, rank 0 commits when all have.

No process group is used here. What a rank reports is JSON under ``save/<number>/<rank>``; saves are numbered alike on
all ranks.
"""

from __future__ import annotations

import json
import logging
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from spot_core.clock import Clock
from spot_core.errors import CommitError, FencedError, Reason, SaveError, SpotError, StoreError
from spot_core.generation import Committed, Open
from spot_core.layout import GenerationId
from spot_core.manifest import Part
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout
from spot_core.pytorch.outcome import Outcome, as_commit_error
from spot_core.retention import Retention
from spot_core.run import Writer

if TYPE_CHECKING:
    from spot_core.pytorch.relay import Share

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
    """The other ranks' coming to a save, or to the load, from when rank 0 came."""
    joint_s: float = 2400.0
    """Until rank 0 comes to the same call as the others (it may be draining a save there)."""
    silent_s: float = 15.0
    """A sign of life of rank 0, while the others wait for it; launchers end them 30 s after it has died. Of another
    rank, while rank 0 waits for it to come to a save: four times as long."""
    stop_s: float = 10.0
    """Meeting all ranks at a stop, beyond the deadline of the notice."""
    close_s: float = 10.0
    """Letting a save in flight finish when the session is closed without a drain."""


def report(channel: Channel, key: str, part: int, ended: Future[Part] | SpotError, **more: Any) -> None:
    """Tell rank 0 how part number `part` of a save went: ``key`` is "save/<number>" or "drain/<number>"."""
    error = ended if isinstance(ended, SpotError) else ended.exception()
    if error is None and not isinstance(ended, SpotError):
        word: dict[str, Any] = {"part": ended.result().to_json(), **more}
    else:
        word = {"error": str(error)}
    try:
        channel.set(f"{key}/{part}", json.dumps(word))
    except ChannelError as lost:
        log.warning("rank %d could not report its part: %s", channel.rank, lost)


@dataclass
class Flight:
    """A save on its way, as rank 0 sees it."""

    number: int
    step: int
    started: float
    """Monotonic seconds."""
    opened: Open
    meta: Mapping[str, Any]
    local_tier: Writer | None = None
    """Where it is committed first; None without a local tier, or when its name is committed there already."""
    drains: bool = True
    """False for a save that stays at the local tier."""
    brought: bool = False
    """No snapshot of now: a generation that lay at the local tier only."""
    harmless: bool = False
    """An earlier life's: that it fails is no failed save."""
    blocked_s: float = 0.0
    staged_s: float | None = None
    durable_s: float | None = None
    local: Committed | None = None
    outcome: Outcome | None = None
    told: bool = False
    """The outcome is in a word to all ranks."""
    landed: threading.Event = field(default_factory=threading.Event)
    """Its snapshot is written somewhere: the memory is free for another."""
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
        tiered: bool = False,
    ) -> None:
        self._channel = channel
        self.tiered = tiered
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

    def start(self, flight: Flight, share: Share | SpotError, staged: threading.Event) -> None:
        """Finish `flight` in the background: `flight.done` is set when its outcome is known."""
        self._work.put(lambda: self._run(flight, lambda: self._save(flight, share, staged)))

    def start_again(self, flight: Flight, parts: Sequence[Part]) -> None:
        """The same for a generation whose `parts` the ranks are bringing from the local tier."""
        self._work.put(lambda: self._run(flight, lambda: self._drain(flight, len(parts))))

    def go_on(self, claim: Callable[[], Writer]) -> None:
        """Write from now on as the life that `claim` takes; what is pruned as the one before would find itself fenced
        by it."""
        with self._pruning:
            self.writer = claim()

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

    def _run(self, flight: Flight, work: Callable[[], Outcome]) -> None:
        try:
            outcome = work()
        except Exception as error:  # noqa: BLE001 - it is the save's outcome, which every rank hears
            if flight.harmless:
                log.warning("spot: generation %s stays at the local tier only: %s", flight.opened.id, error)
                outcome = Outcome(flight.step, local=True)
            else:
                outcome = Outcome(flight.step, error=as_commit_error(error, f"step {flight.step}"))
        flight.outcome = outcome
        self._forget(flight.number)
        flight.landed.set()
        flight.done.set()
        self._ended()
        if outcome.committed is not None and not outcome.local:
            self._prune()

    def _save(self, flight: Flight, share: Share | SpotError, staged: threading.Event) -> Outcome:
        parts, local = self._parts(flight, share, staged)
        if not local:
            return self._commit(flight, parts) if not self.tiered else self._drain(flight, len(parts))
        if flight.local_tier is not None:
            flight.local = self._commit_locally(flight, parts)
        flight.landed.set()
        self._ended()
        if flight.drains:
            return self._drain(flight, len(parts))
        if flight.local is None:
            raise SaveError(f"The save of step {flight.step} could not be committed at the local tier.")
        return Outcome(flight.step, flight.local, local=True)

    def _commit(self, flight: Flight, parts: Sequence[Part]) -> Outcome:
        def durable(committed: Committed) -> None:
            flight.durable_s = self._clock.monotonic() - flight.started
            log.info("spot: generation %s committed in %.2f s", committed.id, flight.durable_s)

        written = flight.opened.seal(parts, world_size=len(parts))
        return Outcome(flight.step, written.commit(flight.meta, durable))

    def _commit_locally(self, flight: Flight, parts: Sequence[Part]) -> Committed | None:
        assert flight.local_tier is not None
        written = flight.local_tier.same(flight.opened).seal(parts, world_size=len(parts))
        try:
            committed = written.commit(flight.meta)
        except FencedError:
            raise
        except CommitError as error:
            log.warning("spot: generation %s has no local copy: %s", flight.opened.id, error)
            return None
        seconds = self._clock.monotonic() - flight.started
        then = "the run's store follows" if flight.drains else "the one before is still on its way to the store"
        log.info("spot: generation %s committed locally in %.2f s; %s", flight.opened.id, seconds, then)
        return committed

    def _drain(self, flight: Flight, count: int) -> Outcome:
        """Every rank's part at the run's store; rank 0's first, since its time tells how long to wait for others'."""
        keys = [f"drain/{flight.number}/{part}" for part in range(count)]
        mine, theirs = keys[:1], keys[1:]
        words = self._words(flight, mine, self._patience.write_s)
        limit = max(self._patience.report_s, 3 * (self._clock.monotonic() - flight.started))
        words += self._words(flight, theirs, limit) if theirs else []
        return self._commit(flight, [Part.from_json(word["part"]) for word in words])

    def _words(self, flight: Flight, keys: Sequence[str], limit: float) -> list[dict[str, Any]]:
        """What ranks said under `keys`, whose last parts are their numbers. Raises SaveError."""
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
        failures = [
            f"rank {key.rpartition('/')[2]}: {word['error']}"
            for key, word in zip(keys, words, strict=True)
            if "error" in word
        ]
        if failures:
            raise SaveError(f"The save of step {flight.step} failed on {'; '.join(failures)}")
        return words

    def _parts(self, flight: Flight, share: Share | SpotError, staged: threading.Event) -> tuple[list[Part], bool]:
        """All ranks' parts where they landed, and whether all of them lie at the local tier."""
        mine: Part | None = None
        failed: SpotError | None = None
        try:
            mine = self._own(flight, share, staged)
        except SpotError as error:
            failed = error
        # A failed save is over only when no rank is writing for it any more.
        words = self._others(flight)
        if failed is not None:
            raise failed
        assert mine is not None
        assert not isinstance(share, SpotError)
        local = share.local and all(word["local"] for word in words)
        return [mine, *(Part.from_json(word["part"]) for word in words)], local

    def _own(self, flight: Flight, share: Share | SpotError, staged: threading.Event) -> Part:
        if isinstance(share, SpotError):
            raise share
        limit = self._patience.write_s
        if staged.wait(limit):
            flight.staged_s = self._clock.monotonic() - flight.started
        try:
            return share.landed.result(max(0.0, limit - (self._clock.monotonic() - flight.started)))
        except FutureTimeout:
            raise SaveError(
                f"The save of step {flight.step}: rank 0 did not finish writing within {limit:.0f} s. Earlier "
                "generations are whole."
            ) from None

    def _others(self, flight: Flight) -> list[dict[str, Any]]:
        ranks = range(1, self._channel.world_size)
        if not ranks:
            return []
        limit = max(self._patience.report_s, 3 * (self._clock.monotonic() - flight.started))
        return self._words(flight, [f"save/{flight.number}/{rank}" for rank in ranks], limit)

    def _forget(self, number: int) -> None:
        ranks = range(self._channel.world_size)
        try:
            self._channel.delete(f"{stage}/{number}/{rank}" for stage in ("save", "drain") for rank in ranks)
        except ChannelError as error:
            log.debug("keys of save %d are left: %s", number, error)

    def _prune(self) -> None:
        with self._pruning:
            try:
                self.writer.prune(self._retention, damaged=self._damaged)
            except (StoreError, FencedError) as error:
                # The next one goes on where this one stopped; a fence shows at the next commit.
                log.warning("spot: old generations could not be pruned: %s", error)
