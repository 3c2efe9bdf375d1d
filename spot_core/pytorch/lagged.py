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

from spot_core.pytorch.agree import Agreed, Request

log = logging.getLogger(__name__)


class LaggedAgreement:
    """`agree.Agreement` over a gloo group that nobody else uses. `timeout_s` bounds every wait for the other ranks."""

    def __init__(self, group: dist.ProcessGroup, *, timeout_s: float = 60.0) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._timeout = timedelta(seconds=timeout_s)
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
        except RuntimeError as error:  # gloo: a peer is gone or silent
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
            self._work.wait(self._timeout)
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

    def _aborted(self, step: int) -> Agreed:
        with self._lock:
            mine, self._outbox = tuple(self._outbox), []
        return Agreed(step, mine, self._lost, any(r.deadline is not None for r in mine), lost=True)
