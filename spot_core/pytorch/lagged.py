"""Agreement where the ranks share no store (MPI, user-made groups): an all-reduce per step that is read one step later.

Costs some 150 us per step on gloo, against 20 us for `FreezeAgreement`, and the step cannot get ahead of the slowest
rank by more than one boundary; in exchange it needs nothing but the group.
"""

from __future__ import annotations

import logging
import threading
from dataclasses import asdict, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.pytorch.agree import Agreed, Request, hurry_s

log = logging.getLogger(__name__)

_PATIENT_S = 60.0
_LOOK_S = 0.5


class LaggedAgreement:
    """`agree.Agreement` over a gloo group that no other thread uses.

    `patient_s` bounds the wait for ranks that are behind; a request with a deadline shortens it. A dead rank is noticed
    at once.
    """

    def __init__(self, group: dist.ProcessGroup, *, patient_s: float = _PATIENT_S, clock: Clock = SYSTEM_CLOCK) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._patient_s = patient_s
        self._clock = clock
        self._lock = threading.Lock()
        self._outbox: list[Request] = []
        self._flag = torch.zeros(1, dtype=torch.int32)
        self._work: dist.Work | None = None
        self._lost = ""
        self._closed = False

    def request(self, request: Request) -> None:
        with self._lock:
            self._outbox.append(replace(request, rank=self._rank))

    def boundary(self, step: int, sub: int = 0) -> Agreed | None:
        if self._closed:
            return None
        try:
            if not self._lost:
                return self._exchange(step)
        except (RuntimeError, TimeoutError) as error:  # gloo: a peer is gone; ours: it is silent
            self._lost = f"the ranks could not agree: {error}"
            log.warning("rank %d: %s", self._rank, self._lost)
            return self._aborted(step)
        return self._aborted(step) if self._outbox else None

    def close(self) -> None:
        # The all-reduce of the last boundary is left to end by itself: waiting here would wait for a dead rank.
        self._closed = True

    def _exchange(self, step: int) -> Agreed | None:
        asked = False
        if self._work is not None:
            self._wait(self._work)
            asked = bool(self._flag.item())
        if asked:
            # Every rank reads the same flag at the same boundary, so this is a collective of all.
            self._work = None
            with self._lock:
                mine, self._outbox = self._outbox, []
            said: list[Any] = [None] * dist.get_world_size(self._group)
            dist.all_gather_object(said, [asdict(request) for request in mine], group=self._group)
            return Agreed(step, tuple(Request(**request) for word in said for request in word))
        with self._lock:
            self._flag.fill_(1 if self._outbox else 0)
        self._work = dist.all_reduce(self._flag, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return None

    def _wait(self, work: dist.Work) -> None:
        """Raises TimeoutError for ranks that do not come, RuntimeError for one that is gone."""
        began = self._clock.monotonic()
        while True:
            try:
                work.wait(timedelta(seconds=_LOOK_S))
                return
            except RuntimeError:
                # Also what a time-out raises, which leaves the operation as it is.
                if work.is_completed():
                    raise
            waited_s = self._clock.monotonic() - began
            if waited_s > min(self._patient_s, self._hurry_s()):
                raise TimeoutError(f"not every rank has come to the same boundary within {waited_s:.1f} s")

    def _hurry_s(self) -> float:
        with self._lock:
            deadlines = [request.deadline for request in self._outbox if request.deadline is not None]
        return hurry_s(min(deadlines, default=None), self._clock.now())

    def _aborted(self, step: int) -> Agreed:
        with self._lock:
            mine, self._outbox = tuple(self._outbox), []
        return Agreed(step, mine, self._lost, any(r.deadline is not None for r in mine), lost=True)
