"""From a rank's state to a part on its way: split, plan with the other ranks, stage, hand to the writer."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from spot_core import memory
from spot_core.errors import SpotError
from spot_core.layout import PartTarget
from spot_core.pytorch.committer import report
from spot_core.pytorch.live import Live
from spot_core.pytorch.outcome import as_commit_error
from spot_core.pytorch.plan import SMALL_BYTES, RankPlan
from spot_core.pytorch.relay import Share
from spot_core.pytorch.stage import storage_ids
from spot_core.pytorch.state import Split, split
from spot_core.writer import WriteJob


@dataclass(frozen=True)
class Opened:
    """A save that rank 0 has opened, as every rank hears of it."""

    number: int
    target: PartTarget
    """Where this rank's part goes."""
    drains: bool = True
    spare: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()


def begin_snapshot(
    live: Live,
    opened: Opened,
    shared: Mapping[str, Any],
    local: Mapping[str, Any],
    stable: Iterable[torch.Tensor],
    droppable: Collection[str],
    *,
    frozen: Iterable[torch.Tensor] = (),
    allow_pickle: bool,
) -> Share | SpotError:
    """Collective: this rank's part, on its way, or why it is not; rank 0 hears of it. Copies of stable tensors wait for
    `live.stager.go()`.

    Raises SaveError on every rank when the states do not fit together or one of them cannot be taken apart; on the
    rank whose state it is, ConfigError.
    """
    live.tried = True
    live.relay.clear()
    if live.client.busy:  # with a save that rank 0 gave up while this rank was still writing
        live.client.abandon()
    state, own = _split(live, shared, local, droppable, allow_pickle)
    live.given = shared
    plan = _plan(live, state, own, frozen)
    live.joint.forget()
    if live.client.slab is None:
        memory.fits(plan.room)
    look = live.baseline.begin(plan, opened.target.index_key, live.newest, live.client.base_digests)
    rank = live.channel.rank
    try:
        settled = None if look is None else partial(live.baseline.settled, look)
        live.stager.stage(plan, storage_ids(stable), look, settled)
        index = plan.index(state.tree, own.tree)
        job = WriteJob(
            rank,
            opened.target,
            plan.size,
            index,
            spare=opened.spare,
            extra=opened.extra,
            base_room=plan.base_size if look is not None else 0,
        )
        share = live.relay.send(opened.number, job, drains=opened.drains)
    except (SpotError, OSError, RuntimeError, ValueError) as error:
        # Rank 0 hears of it like of any failed write, so that all ranks take it at the same call.
        failed = as_commit_error(error, f"{opened.target.index_key} on rank {rank}")
        if rank != 0:
            report(live.channel, f"save/{opened.number}", rank, failed)
        return failed
    live.shares = [*live.shares[-1:], share]
    return share


def rehearse(
    live: Live,
    shared: Mapping[str, Any],
    local: Mapping[str, Any],
    stable: Iterable[torch.Tensor],
    droppable: Collection[str],
    *,
    frozen: Iterable[torch.Tensor] = (),
    allow_pickle: bool,
) -> None:
    """Not collective: what the first save would find out first, found out now; nothing is copied or written.

    Raises ConfigError for a state that could not be loaded back.
    """
    live.tried = True
    state = live.splitter.split(dict(shared), droppable=droppable, allow_pickle=allow_pickle)
    own = split(dict(local), allow_pickle=allow_pickle)
    if live.channel.world_size > 1:
        live.planner.draft(state.tensors)  # the plan itself takes all ranks
        return
    plan = _plan(live, state, own, frozen)
    live.stager.prepare(plan, storage_ids(stable))
    _ = plan.tensors.text  # encoded once; in the first save it would be beside the training's thread


def _plan(live: Live, state: Split, own: Split, frozen: Iterable[torch.Tensor]) -> RankPlan:
    return live.planner.plan(
        state.tensors,
        own.tensors,
        shared_objects=state.objects,
        local_objects=own.objects,
        apart=storage_ids(tensor for tensor in frozen if tensor.nbytes >= SMALL_BYTES),
        mutable=live.baseline.mutable,
    )


def _split(
    live: Live, shared: Mapping[str, Any], local: Mapping[str, Any], droppable: Collection[str], allow_pickle: bool
) -> tuple[Split, Split]:
    try:
        state = live.splitter.split(dict(shared), droppable=droppable, allow_pickle=allow_pickle)
        return state, split(dict(local), allow_pickle=allow_pickle)
    except BaseException:
        live.planner.fail()  # the others are on their way into the planner's collective
        raise
