"""Save a state as a generation, by the real planner, stager and writer, without a session around them."""

from __future__ import annotations

from collections.abc import Set
from typing import Any

import torch.distributed as dist

from spot_core.pytorch.plan import Planner, RankPlan
from spot_core.pytorch.stage import Stager
from spot_core.pytorch.state import split
from spot_core.run import Committed, Run, Writer
from spot_core.verify import Depth, Verified
from spot_core.writer import WriteJob, WriterClient


class Saver:
    """One rank's way of saving; rank 0 holds the claimed life and commits."""

    def __init__(self, run: Run, group: dist.ProcessGroup | None = None) -> None:
        self.run = run
        self.group = group
        self.planner = Planner(group)
        self.writer: Writer | None = run.claim() if self.planner.rank == 0 else None
        self.client = WriterClient.start(run.store, mode="thread")
        self.stager = Stager(self.client)

    def save(
        self,
        step: int,
        shared: Any,
        local: Any = None,
        *,
        pinned: Set[str] = frozenset(),
        allow_pickle: bool = False,
    ) -> tuple[Committed | None, RankPlan]:
        """The committed generation (None but on rank 0) and this rank's plan."""
        theirs, mine = split(shared, allow_pickle=allow_pickle), split(local, allow_pickle=allow_pickle)
        plan = self.planner.plan(
            theirs.tensors,
            mine.tensors,
            shared_objects=theirs.objects,
            local_objects=mine.objects,
            pinned=pinned,
        )
        opened = self.writer.begin(step) if self.writer else None
        targets = [[opened.target(rank) for rank in range(self.planner.world_size)]] if opened else [None]
        if self.group is not None:
            dist.broadcast_object_list(targets, src=0, group=self.group)
        self.stager.stage(plan)
        index = plan.index(theirs.tree, mine.tree)
        written = self.client.submit(WriteJob(plan.rank, targets[0][plan.rank], plan.size, index))
        self.stager.go()
        part = written.result(60)
        parts = [part]
        if self.group is not None:
            parts = [None] * self.planner.world_size
            dist.all_gather_object(parts, part, group=self.group)
        return (opened.seal(parts, world_size=len(parts)).commit({}) if opened else None), plan

    def close(self) -> None:
        self.stager.close()
        self.client.close()


def save_one(run: Run, shared: Any, local: Any = None, *, step: int = 1, **keywords: Any) -> Verified:
    """Save on one rank, as a life of its own, and look at the result as a resume would."""
    saver = Saver(run)
    try:
        committed, _ = saver.save(step, shared, local, **keywords)
    finally:
        saver.close()
    assert committed is not None
    return run.verify(committed, Depth.SIZES)
