"""Notices of all ranks, for rank 0 to read while it stands still behind a save and comes to no boundary."""

from __future__ import annotations

import json
import logging
import threading

from spot_core.pytorch.channel import Channel, ChannelError
from spot_core.signals.notice import Notice

log = logging.getLogger(__name__)


class Bulletin:
    """Over the channel; by rank, so that no rank's notice covers another's."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._mine: dict[str, Notice] = {}

    def post(self, notice: Notice) -> None:
        """From any thread; a channel that fails is left to whoever agrees on the notice to find out."""
        with self._lock:
            self._mine[notice.id] = notice
            word = json.dumps([each.to_json() for each in self._mine.values()])
            try:
                self._channel.set(self._key(self._channel.rank), word)
            except ChannelError as error:
                log.debug("notice %s is not posted: %s", notice.id, error)

    def read(self) -> list[Notice]:
        """All notices posted so far, in no order. Raises ChannelError."""
        keys = [key for key in map(self._key, range(self._channel.world_size)) if self._channel.has(key)]
        return [Notice.from_json(word) for key in keys for word in json.loads(self._channel.get(key))]

    @staticmethod
    def _key(rank: int) -> str:
        return f"told/{rank}"
