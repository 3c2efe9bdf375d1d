"""The way of one rank's part: to the run's store, or to the local tier first and from there to the store behind it.

Every step is reported to rank 0 over the channel. Where many ranks write to one store they take turns: rank r begins
when rank r - width has ended, so that `width` of them write at a time and nobody has to be asked.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, replace

from spot_core.errors import SaveError
from spot_core.layout import PartTarget
from spot_core.manifest import ObjectRef, Part
from spot_core.pytorch.channel import Channel, ChannelError
from spot_core.pytorch.committer import report
from spot_core.writer import DrainJob, WriteJob, WriterClient

log = logging.getLogger(__name__)

MOST_AT_ONCE = 128
"""With `writers_at_once=0`, so many ranks write to the store at one time."""


@dataclass
class Share:
    """This rank's part of a save. `landed`: the part where it came first, after which the slab is free; `local`, once
    that is done, whether this is the local tier. `durable`: the part at the run's store; None when it stays local."""

    landed: Future[Part]
    durable: Future[Part] | None
    local: bool = False


class Relay:
    """Sends this rank's parts on their way. `tiered`: there is a local tier. `wait_s` bounds the wait for a turn."""

    def __init__(self, client: WriterClient, channel: Channel, *, tiered: bool, at_once: int, wait_s: float) -> None:
        self._client = client
        self._channel = channel
        self._tiered = tiered
        self._width = at_once or MOST_AT_ONCE
        self._wait_s = wait_s
        self._given_up = threading.Event()
        self.lent: tuple[ObjectRef, ...] = ()
        """What parts that are drained may refer to at the run's store."""

    def clear(self) -> None:
        """Before another snapshot: a write that still waits for its turn is given up."""
        self._given_up.set()
        self._given_up = threading.Event()

    def send(self, number: int, job: WriteJob, *, drains: bool) -> Share:
        """The staged snapshot on its way, as save `number`; `drains`: on to the store. Raises SaveError."""
        if not self._tiered:
            future = self._in_turn(number, lambda: self._client.submit(job))
            share = Share(future, future)
            self._tell_landing(number, job, share)
            return share
        share = Share(_future(), _future() if drains else None, local=True)
        self._tell_landing(number, job, share)
        first = self._client.submit(replace(job, local=True))
        first.add_done_callback(lambda done: self._at_local_tier(number, job, share, done))
        return share

    def drain(self, number: int, part: Part, target: PartTarget) -> Future[Part]:
        """Bring a part from the local tier to the store, and tell rank 0 of its end under ``drain/<number>``."""
        future = self._in_turn(number, lambda: self._client.drain(DrainJob(part, target, self.lent)))
        future.add_done_callback(lambda done: report(self._channel, f"drain/{number}", part.rank, done))
        return future

    def _tell_landing(self, number: int, job: WriteJob, share: Share) -> None:
        if self._channel.rank != 0:  # rank 0's own is looked at directly
            share.landed.add_done_callback(
                lambda done: report(self._channel, f"save/{number}", job.rank, done, local=share.local)
            )

    def _at_local_tier(self, number: int, job: WriteJob, share: Share, done: Future[Part]) -> None:
        error = done.exception()
        if error is None:
            share.landed.set_result(done.result())
            if share.durable is not None:
                target = PartTarget(job.target.blob_key, job.target.index_key)
                _pass_on(self.drain(number, done.result(), target), share.durable)
            return
        if share.durable is None:
            share.landed.set_exception(error)
            return
        # The slab still holds the snapshot: a full or broken local disk costs the local copy, not the save.
        share.local = False
        log.warning("spot: rank %d writes past its local tier: %s", job.rank, error)
        direct = self._in_turn(number, lambda: self._client.submit_again(job))
        direct.add_done_callback(lambda end: report(self._channel, f"drain/{number}", job.rank, end))
        _pass_on(direct, share.landed)
        _pass_on(direct, share.durable)

    def _in_turn(self, number: int, start: Callable[[], Future[Part]]) -> Future[Part]:
        rank, world = self._channel.rank, self._channel.world_size
        if world <= self._width:
            return _started(start)
        if rank < self._width:
            future = _started(start)
        else:
            future, given_up = _future(), self._given_up
            threading.Thread(
                target=self._wait_for_turn, args=(number, start, future, given_up), name="spot-turn", daemon=True
            ).start()
        if rank + self._width < world:
            future.add_done_callback(lambda _: self._pass_turn(number))
        return future

    def _wait_for_turn(
        self, number: int, start: Callable[[], Future[Part]], future: Future[Part], given_up: threading.Event
    ) -> None:
        before = self._channel.rank - self._width
        key = f"turn/{number}/{before}"
        try:
            channel = self._channel.clone()
            channel.wait([key], self._wait_s, cancel=given_up)
            channel.delete([key])
        except ChannelError as error:
            late = f"rank {self._channel.rank} did not get its turn after rank {before}: {error}"
            future.set_exception(SaveError(late))
            return
        if given_up.is_set():
            future.set_exception(SaveError("it was given up while it waited for its turn"))
            return
        _pass_on(_started(start), future)

    def _pass_turn(self, number: int) -> None:
        try:
            self._channel.set(f"turn/{number}/{self._channel.rank}", "")
        except ChannelError as lost:
            log.warning("rank %d could not pass on its turn: %s", self._channel.rank, lost)


def _started(start: Callable[[], Future[Part]]) -> Future[Part]:
    try:
        return start()
    except SaveError as error:
        failed = _future()
        failed.set_exception(error)
        return failed


def _future() -> Future[Part]:
    future = Future[Part]()
    future.set_running_or_notify_cancel()
    return future


def _pass_on(source: Future[Part], sink: Future[Part]) -> None:
    def copy(done: Future[Part]) -> None:
        error = done.exception()
        if error is None:
            sink.set_result(done.result())
        else:
            sink.set_exception(error)

    source.add_done_callback(copy)
