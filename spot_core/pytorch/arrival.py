"""The ranks come to a session's start or to a save, before anything that a rank which does not come would hold up."""

from __future__ import annotations

import itertools
import logging
import os
from collections import defaultdict
from collections.abc import Iterator

import torch.distributed as dist

from spot_core.clock import Clock
from spot_core.errors import ConfigError, Reason, RestoreError, SaveError
from spot_core.pytorch import _private
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout
from spot_core.pytorch.joint import Joint
from spot_core.pytorch.ranks import Ranks

log = logging.getLogger(__name__)

_SLACK_S = 30.0
"""For rank 0's word, beyond the time that it waits itself: it may have come later than those that wait for it."""

_meetings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of this process, by the ranks that meet


def arrive(ranks: Ranks, timeout_s: float, clock: Clock) -> None:
    """All ranks have come when this returns. They meet over the store of the default process group; where that cannot
    be cloned nothing is waited for here.

    Raises RestoreError (reason MISSING_RANKS) on every rank that came, naming those that did not within `timeout_s`.
    """
    if ranks.world_size == 1:
        return
    try:
        store = _private.clone_default_store()
    except (ConfigError, RuntimeError) as error:
        log.debug("rank %d comes unannounced: %s", ranks.rank, error)
        return
    assert ranks.group is not None
    members = ",".join(map(str, dist.get_process_group_ranks(ranks.group)))
    attempt = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')}/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    prefix = f"spot/arrival/{attempt}/{members}/{next(_meetings[members])}"
    channel = Channel(
        dist.PrefixStore(prefix, store),  # type: ignore[attr-defined]
        rank=ranks.rank,
        world_size=ranks.world_size,
        clock=clock,
    )
    if ranks.rank:
        channel.set(f"here/{ranks.rank}", "")
        try:
            missing = channel.wait(["all/0"], timeout_s + _SLACK_S)[0]
        except ChannelTimeout:
            missing = "0"
    else:
        try:
            keys = [f"here/{rank}" for rank in range(1, ranks.world_size)]
            channel.wait(keys, timeout_s)
            channel.delete(keys)  # torchrun's store outlives a change of its agents, which counts as no restart
            missing = ""
        except ChannelTimeout as late:
            missing = ", ".join(map(str, late.ranks))
        channel.set("all/0", missing)
    if missing:
        raise RestoreError(
            f"Nothing was loaded: rank {missing} did not come to the load within {timeout_s:g} s. Nothing was changed.",
            reason=Reason.MISSING_RANKS,
            hint="Its log, or a dump of its stack (py-spy), tells where it is.",
        )


def await_ranks(joint: Joint, step: int, arrive_s: float) -> None:
    """On rank 0, before the collective of a save: a rank that does not come would hold up the others in it for half an
    hour. Raises SaveError that names it, sooner when it has died."""
    try:
        joint.arrive(arrive_s)
    except ChannelTimeout as late:
        raise SaveError(
            f"Nothing was saved at step {step}: rank {', '.join(map(str, late.ranks))} did not come to the save within "
            f"{arrive_s:g} s. Earlier generations are whole.",
            reason=Reason.MISSING_RANKS,
            hint="Its log, or a dump of its stack (py-spy), tells where it is.",
        ) from late
    except ChannelError as dead:
        raise SaveError(
            f"Nothing was saved at step {step}: {dead}. Earlier generations are whole.",
            reason=Reason.MISSING_RANKS,
            hint="Its log, and that of its machine, may tell why.",
        ) from dead
