"""A sign of life of rank 0, for the ranks that wait for its word.

They wait without limit to speak of, since rank 0 may be draining a save; but when it has died they would wait just as
long, and nothing tells them: the store usually lives on in a launcher. So a thread of rank 0 counts up in the channel.
"""

from __future__ import annotations

import logging
import threading

from spot_core.pytorch.channel import Channel, ChannelError

log = logging.getLogger(__name__)

_KEY = "pulse/0"
_BEAT_S = 2.0


class Pulse:
    """Of a session; counts on rank 0 from `start` to `close`. After `silent_s` without it rank 0 is taken for dead."""

    def __init__(self, channel: Channel, *, silent_s: float) -> None:
        self._channel = channel
        self._beat_s, self._silent_s = min(_BEAT_S, silent_s / 5), silent_s
        self._closing = threading.Event()

    def start(self) -> None:
        """Once this returns on rank 0 the others can tell whether it is there."""
        if self._channel.rank == 0 and self._channel.world_size > 1:
            channel = self._channel.clone()
            channel.set(_KEY, "0")
            threading.Thread(target=self._count, args=(channel,), name="spot-pulse", daemon=True).start()

    def close(self) -> None:
        self._closing.set()

    def watch(self) -> Watch:
        """For one wait; tells of no silence before it."""
        return Watch(self._channel, self._silent_s)

    def _count(self, channel: Channel) -> None:
        beats = 0
        try:
            while not self._closing.wait(self._beat_s):
                beats += 1
                channel.set(_KEY, str(beats))
        except ChannelError as error:
            log.debug("no more signs of life: %s", error)


class Watch:
    """One rank's eye on rank 0 while it waits for it."""

    def __init__(self, channel: Channel, silent_s: float) -> None:
        self._channel, self._silent_s = channel, silent_s
        self._seen = ""
        self._since = channel.clock.monotonic()

    def look(self) -> None:
        """Raises ChannelError, naming rank 0, when it has been silent for too long."""
        if not self._channel.has(_KEY):
            return
        count, now = self._channel.get(_KEY), self._channel.clock.monotonic()
        if count != self._seen:
            self._seen, self._since = count, now
        elif now - self._since > self._silent_s:
            raise ChannelError(
                f"rank 0 has given no sign of life for {now - self._since:.0f} s while rank {self._channel.rank} "
                "waited for its word: it is taken for dead"
            )
