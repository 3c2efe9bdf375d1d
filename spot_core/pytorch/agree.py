"""All ranks take the same request at the same step, at the cost of a lock and an integer per step.

Freeze and publish, after the preemption sync of TSL (the runtime under JAX): any rank opens a round; every rank then
publishes the last boundary it passed, and its next boundary waits; the round takes effect at the first boundary after
the largest one published. Nobody can have passed it, since a published rank stands still until the result is known, and
a rank that waits in a collective is at no boundary, so its watcher thread publishes all the same.

Two additions. Before the freeze, every watcher says that it is awake, so that the loops stand still for a fast exchange
only and not for a polling interval. And the result is one key that the first writer wins, so that a round that times
out is aborted on every rank or on none, a rank that comes late included.

A rank that has left its loop counts as published; if it was the last to move, the agreed step lies past the end and the
save at the end of training serves. A dead rank ends in `Agreed.aborted`, never in a hang.
"""

from __future__ import annotations

import json
import logging
import math
import os
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Protocol

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout

log = logging.getLogger(__name__)

Position = tuple[int, int]

_PATIENT_S = 60.0
_PAUSE_S = 0.002


@dataclass(frozen=True)
class Request:
    """What a rank wants all ranks to do. `payload` is JSON; `deadline` unix s, None when there is no hurry."""

    kind: str
    payload: Mapping[str, Any] = field(default_factory=dict)
    deadline: float | None = None
    rank: int = -1


@dataclass(frozen=True)
class Agreed:
    """One or more rounds that took effect at this boundary.

    `aborted` says why there was no agreement; then the ranks need not be at the same step and no joint save may be
    tried. `requests` of an aborted round are this rank's own; `urgent` says whether any rank's named a deadline.
    `lost` means that no later round can be agreed either.
    """

    step: int
    requests: tuple[Request, ...]
    aborted: str = ""
    urgent: bool = False
    lost: bool = False


def hurry_s(deadline: float | None, now: float) -> float:
    """How long to wait for silent ranks: a tenth of what is left, between 2 and 5 s; inf without a deadline."""
    return math.inf if deadline is None else min(5.0, max(2.0, 0.1 * (deadline - now)))


class Agreement(Protocol):
    """What `Session` needs; `FreezeAgreement` where the ranks share a store, `lagged.LaggedAgreement` where not."""

    def request(self, request: Request) -> None:
        """Ask all ranks; from any thread of any rank, never blocks."""

    def boundary(self, step: int, sub: int = 0) -> Agreed | None:
        """Note that `step` is done; what was agreed for this boundary, the same on every rank."""

    def close(self) -> None:
        """Leave the loop: this rank takes part in no further round. Idempotent."""


class FreezeAgreement:
    """Freeze and publish over a channel.

    `boundary` must be called by every rank with the same rising sequence of (step, sub); `sub` is for boundaries
    inside a step, such as the batches of a validation, and only if every rank has the same number of them.

    `poll_s` is how often the watcher looks for a round opened by another rank; None for once a second per 500 ranks,
    at least ten times a second, and not at all when there is one rank.
    """

    def __init__(
        self,
        channel: Channel,
        *,
        poll_s: float | None = None,
        patient_s: float = _PATIENT_S,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._channel = channel.clone()
        self._rank, self._ranks = channel.rank, range(channel.world_size)
        self._clock = clock
        self._patient_s = patient_s
        if poll_s is None and channel.world_size > 1:
            poll_s = min(1.0, max(0.1, channel.world_size / 500))
        self._poll_s = poll_s
        # All ranks ask the one store while a round is on.
        self._pause_s = max(_PAUSE_S, 5e-5 * channel.world_size)
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._position: Position = (-1, 0)
        self._outbox: list[Request] = []
        self._published: list[Request] = []
        self._urgent = False
        self._due: list[tuple[Position, Agreed]] = []
        self._frozen_s = 0.0  # how long a boundary may wait for the result; 0 when not frozen
        self._quiet = True  # nothing frozen, nothing due: the fast path
        self._broken = ""
        self._round = 0
        self._closing = threading.Event()
        self._wake = threading.Event()
        self._watcher = threading.Thread(target=self._watch, name="spot-agree", daemon=True)
        self._watcher.start()

    def request(self, request: Request) -> None:
        with self._lock:
            self._outbox.append(replace(request, rank=self._rank))
            if self._broken:
                self._abort(self._broken)
        self._wake.set()

    def boundary(self, step: int, sub: int = 0) -> Agreed | None:
        with self._lock:
            if self._quiet:
                self._position = (step, sub)
                return None
            return self._boundary((step, sub))

    def close(self) -> None:
        if os.getpid() != self._pid:
            return
        self._closing.set()
        self._wake.set()
        if threading.current_thread() is not self._watcher:
            self._watcher.join(timeout=5.0)

    # -- under the lock -------------------------------------------------------------------------------------------

    def _boundary(self, position: Position) -> Agreed | None:
        if self._frozen_s and not self._changed.wait_for(lambda: not self._frozen_s, timeout=self._frozen_s):
            # The watcher itself is stuck (store host unreachable): nothing can be agreed any more.
            self._fail("the store shared by the ranks did not answer")
        self._position = position
        due = [agreed for after, agreed in self._due if position > after]
        self._due = [(after, agreed) for after, agreed in self._due if position <= after]
        self._settle()
        if not due:
            return None
        return Agreed(
            position[0],
            tuple(request for agreed in due for request in agreed.requests),
            "; ".join(agreed.aborted for agreed in due if agreed.aborted),
            any(agreed.urgent for agreed in due),
            bool(self._broken),
        )

    def _abort(self, why: str) -> None:
        """Tell the next boundary of this rank that its own requests came to nothing."""
        mine = (*self._published, *self._outbox)
        self._published, self._outbox = [], []
        urgent = self._urgent or any(request.deadline is not None for request in mine)
        self._due.append(((-1, -1), Agreed(-1, mine, why, urgent)))
        self._settle()

    def _fail(self, why: str) -> None:
        self._broken = why
        self._frozen_s = 0.0
        self._abort(why)

    def _settle(self) -> None:
        self._quiet = not (self._frozen_s or self._due)
        self._changed.notify_all()

    # -- the watcher thread ---------------------------------------------------------------------------------------

    def _watch(self) -> None:
        try:
            while not self._closing.is_set() and not self._broken:
                if self._outbox or self._channel.has(self._key("open")):
                    self._hold_round()
                else:
                    self._wake.wait(self._poll_s)
                    self._wake.clear()
            self._channel.set(f"a/done/{self._rank}", json.dumps(self._position))
        except ChannelError as error:
            with self._lock:
                if not self._broken:
                    self._fail(str(error))
            if not self._closing.is_set():
                log.warning("rank %d: agreement between the ranks ends: %s", self._rank, error)

    def _key(self, name: str) -> str:
        return f"a/{self._round}/{name}"

    def _hold_round(self) -> None:
        """Take part in the present round to its end."""
        patience_s = self._open()
        self._channel.set(self._key(f"awake/{self._rank}"), "")
        if self._rank == 0:
            result = self._lead(patience_s)
        else:
            result = self._follow(patience_s)
        if result is None:  # this rank or rank 0 left its loop: what was asked has no step left to happen at
            self._thaw()
        else:
            self._adopt(result)
            if "abort" not in result:
                self._forget(self._round - 1)
        self._round += 1

    def _open(self) -> float:
        """Open the round or read why it was opened; returns how long its phases may take, in seconds."""
        with self._lock:
            deadlines = [r.deadline for r in self._outbox if r.deadline is not None]
        mine = json.dumps(min(deadlines, default=None))
        deadline = json.loads(self._channel.set_if_absent(self._key("open"), mine))
        self._urgent = deadline is not None
        return min(self._patient_s, hurry_s(deadline, self._clock.now()))

    def _lead(self, patience_s: float) -> dict[str, Any] | None:
        """Rank 0: freeze everybody once all are awake, then write the result."""
        try:
            self._gather("awake", patience_s)
            self._channel.set(self._key("freeze"), "")
            self._publish(patience_s)
            said = self._gather("at", patience_s)
            if self._closing.is_set():
                return None
            after = max(tuple(word["position"]) for word in said)
            requests = [request for word in said for request in word["requests"]]
            result = {"after": after, "requests": requests}
        except ChannelTimeout as error:
            if self._closing.is_set():
                return None
            result = {"abort": str(error)}
        return self._decide(result)

    def _follow(self, patience_s: float) -> dict[str, Any] | None:
        """Other ranks: wait for the freeze, publish, wait for the result; abort for all when rank 0 is silent."""
        freeze, verdict, rank0_left = self._key("freeze"), self._key("verdict"), "a/done/0"
        published = False
        end = self._clock.monotonic() + 2 * patience_s + 2.0
        while not self._closing.is_set():
            if self._channel.has(verdict):
                result: dict[str, Any] = json.loads(self._channel.get(verdict))
                return result
            if not published and self._channel.has(freeze):
                self._publish(2 * patience_s + 2.0)
                published = True
                continue
            if self._channel.has(rank0_left) and not self._channel.has(verdict):
                return None
            if self._clock.monotonic() > end:
                return self._decide({"abort": f"no word from rank 0 within {2 * patience_s + 2.0:.1f} s"})
            self._closing.wait(self._pause_s)
        return None

    def _gather(self, name: str, timeout_s: float) -> list[dict[str, Any]]:
        """What every rank published under `name`; a rank that has left its loop stands at its last boundary."""
        said: list[dict[str, Any]] = []
        end = self._clock.monotonic() + timeout_s
        for rank in self._ranks:
            key, left_key = self._key(f"{name}/{rank}"), f"a/done/{rank}"
            while not self._channel.has(key):
                if self._channel.has(left_key) and not self._channel.has(key):
                    said.append({"position": json.loads(self._channel.get(left_key)), "requests": []})
                    break
                if self._clock.monotonic() > end or self._closing.wait(self._pause_s):
                    raise ChannelTimeout(
                        self._channel.missing(self._key(f"{name}/{r}") for r in self._ranks), timeout_s
                    )
            else:
                word = self._channel.get(key)
                said.append(json.loads(word) if word else {})
        return said

    def _publish(self, wait_s: float) -> None:
        """Say where this rank is, and stand still from here on."""
        with self._lock:
            word = {"position": self._position, "requests": [asdict(request) for request in self._outbox]}
            self._published, self._outbox = self._outbox, []
            self._frozen_s = wait_s + 5.0
            self._settle()
        self._channel.set(self._key(f"at/{self._rank}"), json.dumps(word))

    def _decide(self, result: dict[str, Any]) -> dict[str, Any]:
        """Write the result unless there is one; the one that counts."""
        decided: dict[str, Any] = json.loads(self._channel.set_if_absent(self._key("verdict"), json.dumps(result)))
        return decided

    def _adopt(self, result: dict[str, Any]) -> None:
        with self._lock:
            if self._broken:
                return
            if "abort" in result:
                self._abort(result["abort"])
            else:
                self._published = []
                requests = tuple(Request(**request) for request in result["requests"])
                if requests:
                    after: Position = (result["after"][0], result["after"][1])
                    self._due.append((after, Agreed(-1, requests)))
            self._frozen_s = 0.0
            self._settle()

    def _thaw(self) -> None:
        with self._lock:
            self._frozen_s = 0.0
            self._settle()

    def _forget(self, number: int) -> None:
        """Rank 0 deletes the keys of a round that everybody has left: all have published in a later one."""
        if self._rank == 0 and number >= 0:
            names = [
                "open",
                "freeze",
                "verdict",
                *(f"{name}/{rank}" for name in ("awake", "at") for rank in self._ranks),
            ]
            self._channel.delete(f"a/{number}/{name}" for name in names)
