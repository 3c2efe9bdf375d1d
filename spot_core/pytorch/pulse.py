"""Signs of life: of rank 0 for the ranks that wait for its word, of these for rank 0 where it waits for them to come.

They wait without limit to speak of, since rank 0 may be draining a save, or another rank be busy; but when it has died
they would wait just as long, and nothing tells them: the store usually lives on in a launcher. So a thread of each rank
counts up in the channel.
"""

from __future__ import annotations

import logging
import threading

from spot_core.pytorch.channel import Channel, ChannelError

log = logging.getLogger(__name__)

_BEAT_S = 2.0
_OTHERS = 4
"""The others beat, and are waited for, by so much longer: all of their beats come to the one store."""


class Pulse:
    """Of a session; counts from `start` to `close`. After `silent_s` without it rank 0 is taken for dead, another rank
    after four times that."""

    def __init__(self, channel: Channel, *, silent_s: float) -> None:
        self._channel = channel
        self._silent_s = silent_s
        self._closing = threading.Event()

    def start(self) -> None:
        """Once this returns the others can tell whether this rank is there."""
        if self._channel.world_size > 1:
            channel = self._channel.clone()
            channel.set(_key(channel.rank), "0")
            threading.Thread(target=self._count, args=(channel,), name="spot-pulse", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def watch(self, rank: int) -> Watch:
        """For one wait; tells of no silence before it."""
        return Watch(self._channel, rank, self._silent_s * _longer(rank))

    def _count(self, channel: Channel) -> None:
        beats, key = 0, _key(channel.rank)
        beat_s = min(_BEAT_S, self._silent_s / 5) * _longer(channel.rank)
        try:
            while not self._closing.wait(beat_s):
                beats += 1
                channel.set(key, str(beats))
        except ChannelError as error:
            log.debug("no more signs of life: %s", error)


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _longer(rank: int) -> int:
    return 1 if rank == 0 else _OTHERS


class Watch:
    """One rank's eye on another one while it waits for it."""

    def __init__(self, channel: Channel, rank: int, silent_s: float) -> None:
        self._channel, self._rank, self._silent_s = channel, rank, silent_s
        self._seen = ""
        self._since = channel.clock.monotonic()

    def look(self) -> None:
        """Raises ChannelError, naming the other rank, when it has been silent for too long."""
        if not self._channel.has(_key(self._rank)):
            return
        count, now = self._channel.get(_key(self._rank)), self._channel.clock.monotonic()
        if count != self._seen:
            self._seen, self._since = count, now
        elif now - self._since > self._silent_s:
            raise ChannelError(
                f"rank {self._rank} has given no sign of life for {now - self._since:.0f} s while rank "
                f"{self._channel.rank} waited for {'its word' if self._rank == 0 else 'it'}: it is taken for dead"
            )
