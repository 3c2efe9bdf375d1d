"""Words of rank 0 to all ranks, at calls that every rank makes in the same order; over the channel, so it is cheap."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from typing import Any

from spot_core.errors import SpotError
from spot_core.pytorch.channel import Channel, ChannelTimeout
from spot_core.pytorch.outcome import error_from_json, error_to_json
from spot_core.pytorch.pulse import Pulse, Watch

log = logging.getLogger(__name__)

_LOOK_S = 1.0
_HEARD_S = 5.0
"""For the others to hear of an error, which may end rank 0's process, and the store with it."""


class Joint:
    """A numbered sequence of words; `timeout_s` bounds how long a rank waits for rank 0 to come to the same call.

    `pulse` is started and closed by its owner.
    """

    def __init__(self, channel: Channel, *, timeout_s: float, pulse: Pulse) -> None:
        self._channel = channel
        self._pulse = pulse
        self._timeout_s = timeout_s
        self._number = 0
        self._forgotten = 0

    def arrive(self, timeout_s: float) -> None:
        """Before a `tell` whose word the ranks act on together. Rank 0, inside of `say`: all of them have come.

        Raises ChannelTimeout there, naming those that have not, or ChannelError, naming one that has died; the others
        only say that they are here.
        """
        if self._channel.world_size == 1:
            return
        if self._channel.rank != 0:
            self._channel.set(f"j/{self._number}/here/{self._channel.rank}", "")
            return
        # `tell` has counted on already.
        keys = [f"j/{self._number - 1}/here/{rank}" for rank in range(1, self._channel.world_size)]
        self._wait(keys, timeout_s)
        self._channel.delete(keys)

    def tell(self, say: Callable[[], dict[str, Any]], *, timeout_s: float | None = None) -> dict[str, Any]:
        """What `say` gave on rank 0, as JSON gives it back; a SpotError it raised is raised on every rank.

        Raises ChannelTimeout on the others when rank 0 does not come, ChannelError when it has died.
        """
        number, self._number = self._number, self._number + 1
        if self._channel.rank == 0:
            word, error = self._say(say)
            if self._channel.world_size > 1:
                self._channel.set(f"j/{number}/0", json.dumps({"word": word, "error": error_to_json(error)}))
            if error is not None:
                self.settle(_HEARD_S)
                raise error
            assert word is not None
            return word
        limit = self._timeout_s if timeout_s is None else timeout_s
        heard = json.loads(self._wait([f"j/{number}/0"], limit)[0])
        error = error_from_json(heard["error"])
        if error is not None:
            self.settle(_HEARD_S)
            raise error
        told: dict[str, Any] = heard["word"]
        return told

    def _wait(self, keys: Sequence[str], timeout_s: float) -> list[str]:
        """As the channel's, while those that have not set their keys give signs of life."""
        watches: dict[int, Watch] = {}
        end = self._channel.clock.monotonic() + timeout_s
        while True:
            left_s = end - self._channel.clock.monotonic()
            try:
                return self._channel.wait(keys, min(left_s, _LOOK_S))
            except ChannelTimeout as late:
                if left_s <= _LOOK_S:
                    raise ChannelTimeout(late.keys, timeout_s) from None
                self._pulse.tick()  # with open eyes: whoever watches this rank need not think that it is stuck
                for rank in late.ranks:
                    watches.setdefault(rank, self._pulse.watch(rank)).look()

    def settle(self, timeout_s: float) -> None:
        """After a word that may be the last one: rank 0, whose process may host the store, waits until all heard it.

        A rank that does not say so within `timeout_s` is told of in the log and waited for no longer.
        """
        if self._channel.world_size == 1:
            return
        name = f"j/{self._number - 1}/heard"
        if self._channel.rank != 0:
            self._channel.set(f"{name}/{self._channel.rank}", "")
            return
        keys = [f"{name}/{rank}" for rank in range(1, self._channel.world_size)]
        try:
            self._channel.wait(keys, timeout_s)
            self._channel.delete(keys)
        except ChannelTimeout as late:
            log.warning("spot: %s; going on without", late)

    def forget(self) -> None:
        """Rank 0, right after a collective: every rank has heard the words before it, so their keys can go."""
        if self._channel.rank == 0 and self._channel.world_size > 1:
            self._channel.delete(f"j/{number}/0" for number in range(self._forgotten, self._number))
        self._forgotten = self._number

    def _say(self, say: Callable[[], dict[str, Any]]) -> tuple[dict[str, Any] | None, SpotError | None]:
        try:
            return say(), None
        except SpotError as error:
            return None, error
        except Exception as error:
            # The others wait for a word, and get this one; where it came from is told here.
            log.exception("rank 0 failed where all ranks meet")
            return None, SpotError(f"rank 0 failed: {type(error).__name__}: {error}")
