"""Signs of life: of rank 0 for the ranks that wait for its word, of these for rank 0 where it waits for them to come.

They wait without limit to speak of, since rank 0 may be draining a save, or another rank be busy; but when it has died
they would wait just as long, and nothing tells them: the store usually lives on in a launcher. So a thread of each rank
counts up in the channel.
"""

from __future__ import annotations

import logging
import math
import threading

from spot_core.pytorch.channel import Channel, ChannelError

log = logging.getLogger(__name__)

_BEAT_S = 2.0
_OTHERS = 4
"""The others beat, and are waited for, by so much longer: all of their beats come to the one store."""
_TAKEN = "dead", "stuck"


class Pulse:
    """Of a session; counts from `start` to `close`. After `silent_s` without it rank 0 is taken for dead, another rank
    after four times that; and any one that has called no `tick` for `stuck_s` for stuck."""

    def __init__(self, channel: Channel, *, silent_s: float, stuck_s: float = math.inf) -> None:
        self._channel = channel
        self._silent_s, self._stuck_s = silent_s, stuck_s
        self._ticks = 0
        self._closing = threading.Event()

    def start(self) -> None:
        """Once this returns the others can tell whether this rank is there."""
        if self._channel.world_size > 1:
            channel = self._channel.clone()
            channel.set(_key(channel.rank), "0 0")
            threading.Thread(target=self._count, args=(channel,), name="spot-pulse", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def tick(self) -> None:
        """This rank gets further; from any thread, and cheap."""
        self._ticks += 1  # threads may lose one: that it changes is all that counts

    def watch(self, rank: int) -> Watch:
        """For one wait; tells of no silence before it."""
        return Watch(self._channel, rank, self._silent_s * _longer(rank), self._stuck_s)

    def _count(self, channel: Channel) -> None:
        beats, key = 0, _key(channel.rank)
        beat_s = min(_BEAT_S, self._silent_s / 5) * _longer(channel.rank)
        try:
            while not self._closing.wait(beat_s):
                beats += 1
                channel.set(key, f"{beats} {self._ticks}")
        except ChannelError as error:
            log.debug("no more signs of life: %s", error)


def _key(rank: int) -> str:
    return f"pulse/{rank}"


def _longer(rank: int) -> int:
    return 1 if rank == 0 else _OTHERS


class Watch:
    """One rank's eye on another one while it waits for it."""

    def __init__(self, channel: Channel, rank: int, silent_s: float, stuck_s: float) -> None:
        self._channel, self._rank = channel, rank
        self._bounds = (silent_s, "given no sign of life"), (stuck_s, "got no further")
        self._seen = ["", ""]
        self._since = [channel.clock.monotonic()] * 2

    def look(self) -> None:
        """Raises ChannelError, naming the other rank, when it has been silent or stuck for too long."""
        begun, now = self._channel.has(_key(self._rank)), self._channel.clock.monotonic()
        counts = self._channel.get(_key(self._rank)).split() if begun else ["", ""]
        for at, (count, (bound_s, what)) in enumerate(zip(counts, self._bounds, strict=True)):
            if count != self._seen[at]:
                self._seen[at], self._since[at] = count, now
            elif now - self._since[at] > bound_s:
                raise ChannelError(
                    f"rank {self._rank} has {what} for {now - self._since[at]:.0f} s while rank {self._channel.rank} "
                    f"waited for {'its word' if self._rank == 0 else 'it'}: it is taken for {_TAKEN[at]}"
                )
