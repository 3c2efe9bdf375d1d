"""A small key-value channel between the ranks that is no collective: threads may use it while training communicates.

It runs over a clone of the default c10d store, or over a store of rank 0's own where there is none (`hosted`). A clone
has its own connection: a thread that waits on a shared client blocks every other user of it for seconds. Waiting is
polling `check()`, because `TCPStore.wait` and `multi_get` print C++ warnings each time a timeout passes.

Keys begin with ``spot/<nonce>``: torchrun's in-place restarts may keep the store and the keys of the earlier attempt,
and a second session in one process must not read the first one's. (Its restart count would not do: agents that joined
at different times count differently.)
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.errors import SpotError
from spot_core.pytorch import _private
from spot_core.pytorch.asking import Asking
from spot_core.pytorch.hosted import host_store
from spot_core.pytorch.ranks import Ranks

log = logging.getLogger(__name__)

T = TypeVar("T")

_FIRST_PAUSE_S = 0.0005
_LONGEST_PAUSE_S = 0.02
_ANSWER_S = 60.0


class ChannelError(SpotError):
    """The store behind the channel does not answer (its host, usually the node of rank 0, is gone)."""


class ChannelTimeout(ChannelError, TimeoutError):
    """Keys that did not come in time. `keys` are the missing ones, `ranks` the ranks that should have set them."""

    def __init__(self, keys: Sequence[str], timeout_s: float) -> None:
        self.keys = tuple(keys)
        self.ranks = tuple(sorted({int(key.rsplit("/", 1)[-1]) for key in keys if key.rsplit("/", 1)[-1].isdigit()}))
        who = f"rank {', '.join(map(str, self.ranks))}" if self.ranks else f"key {', '.join(keys)}"
        super().__init__(f"no word from {who} within {timeout_s:.1f} s (waiting for {', '.join(keys[:8])})")


class Channel:
    """Set, get and wait for keys. Threads may share one channel; a thread that polls all the time takes a `clone()`.

    A store that does not answer raises ChannelError after a minute; but one that the host keeps silent about for ever
    holds up a clone, which has the thread to itself (`guarded` False).
    By convention a key that one rank sets ends in ``/<rank>``, so that a timeout can name the rank.

    `hosted` says that the store lives in rank 0's process, for want of one that could be cloned.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        world_size: int,
        clock: Clock = SYSTEM_CLOCK,
        hosted: bool = False,
        guarded: bool = True,
    ) -> None:
        self._store = store
        self._asking = Asking(_ANSWER_S) if guarded and world_size > 1 else None
        self.clock = clock
        self.rank = rank
        self.world_size = world_size
        self.hosted = hosted

    @classmethod
    def open(cls, ranks: Ranks, clock: Clock = SYSTEM_CLOCK) -> Channel:
        """Collective: rank 0 draws the nonce. A HashStore of this process where there is one rank.

        Raises ConfigError, on every rank, when the default store cannot be cloned and one of the ranks does not reach
        rank 0 either.
        """
        if ranks.world_size == 1:
            return cls(_hash_store(), rank=ranks.rank, world_size=1, clock=clock)
        nonce = ranks.from_first(lambda: secrets.token_hex(8))
        shared: Any
        shared, errors = ranks.everywhere(_private.clone_default_store)
        uncloned = [error for error in errors if error is not None]
        if uncloned:
            log.debug("rank %d: %s", ranks.rank, uncloned[0])
            shared = host_store(ranks)
        store = dist.PrefixStore(f"spot/{nonce}", shared)  # type: ignore[attr-defined]
        return cls(store, rank=ranks.rank, world_size=ranks.world_size, clock=clock, hosted=bool(uncloned))

    def clone(self) -> Channel:
        """The same keys over a connection of its own, for a thread of its own."""
        store = self._store.clone()
        return Channel(
            store, rank=self.rank, world_size=self.world_size, clock=self.clock, hosted=self.hosted, guarded=False
        )

    def set(self, key: str, value: str) -> None:
        self._ask(lambda: self._store.set(key, value))

    def set_if_absent(self, key: str, value: str) -> str:
        """Set `key` unless it is set; returns the value it has now, on every rank the same."""
        return bytes(self._ask(lambda: self._store.compare_set(key, "", value))).decode()

    def has(self, *keys: str) -> bool:
        """True when all `keys` are set."""
        return bool(self._ask(lambda: self._store.check(list(keys))))

    def missing(self, keys: Iterable[str]) -> list[str]:
        return [key for key in keys if not self.has(key)]

    def get(self, key: str) -> str:
        """The value of a key that is set; one that is not would block until the store's own timeout."""
        return bytes(self._ask(lambda: self._store.get(key))).decode()

    def delete(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._ask(lambda key=key: self._store.delete_key(key))  # type: ignore[misc]

    def _ask(self, do: Callable[[], T]) -> T:
        try:
            return do() if self._asking is None else self._asking.ask(do)
        except RuntimeError as error:
            raise _lost(error) from error

    def wait(self, keys: Sequence[str], timeout_s: float, *, cancel: threading.Event | None = None) -> list[str]:
        """The values of `keys`, in order, once all are set.

        Raises ChannelTimeout with the missing ones after `timeout_s`, or at once when `cancel` is set.
        """
        cancel = cancel or threading.Event()
        end = self.clock.monotonic() + timeout_s
        pause = _FIRST_PAUSE_S
        while not self.has(*keys):
            left = end - self.clock.monotonic()
            if left <= 0 or cancel.wait(min(pause, left)):
                missing = self.missing(keys)
                if missing:
                    raise ChannelTimeout(missing, timeout_s)
                break
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)
        return [self.get(key) for key in keys]


def _hash_store() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]  # torch's stubs do not export it


def _lost(error: RuntimeError) -> ChannelError:
    return ChannelError(f"the store shared by the ranks, which rank 0 or a launcher hosts, does not answer: {error}")
