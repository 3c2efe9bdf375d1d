"""The ranks come to a session's start or to a save, before anything that a rank which does not come would hold up."""

from __future__ import annotations

import itertools
import json
import logging
import math
import secrets
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch.distributed as dist

from spot_core.clock import Clock
from spot_core.errors import ConfigError, Reason, RestoreError, SaveError
from spot_core.pytorch import _private
from spot_core.pytorch.channel import Channel, ChannelError, ChannelTimeout
from spot_core.pytorch.joint import Joint
from spot_core.pytorch.pulse import Pulse
from spot_core.pytorch.ranks import Ranks

log = logging.getLogger(__name__)

_SLACK_S = 30.0
"""For rank 0's word, beyond the time that it waits itself: it may have come later than those that wait for it."""
_HEARD_S = 5.0
"""For the others to hear of an error, where rank 0's process, which ends by it, may host the store."""
_PAUSE_S = 0.02
_HINT = "Its log, or a dump of its stack (py-spy), tells where it is."

_meetings: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)  # of this process, by the ranks that meet


class Meeting:
    """Ranks that have come, until the life has begun: they wait for each other before each collective, not in it.

    Nobody waits for a rank that gives no sign of life for `silent_s` (see `Pulse`), or that gets no further for
    `stuck_s`, such as in a read that never returns; `tick` tells that this one does.
    """

    def __init__(self, channel: Channel, *, silent_s: float, stuck_s: float) -> None:
        self._pulse = Pulse(channel, silent_s=silent_s, stuck_s=stuck_s)
        self._joint = Joint(channel, timeout_s=math.inf, pulse=self._pulse)
        self._leads = channel.rank == 0
        self._pulse.start()
        self.tick = self._pulse.tick

    def meet(self) -> None:
        """Returns once all ranks have come here. Raises RestoreError (reason MISSING_RANKS), naming one that does not,
        on all that came."""
        self.tick()
        if not self._leads:
            self._joint.arrive(math.inf)
        try:
            self._joint.tell(self._all_here)
        except ChannelError as dead:  # rank 0 itself
            raise _missing(str(dead)) from dead

    def left(self) -> None:
        """Right after the collective."""
        self._joint.forget()

    def close(self) -> None:
        self._pulse.close()

    def _all_here(self) -> dict[str, Any]:
        try:
            self._joint.arrive(math.inf)
        except ChannelError as dead:
            raise _missing(str(dead)) from dead
        return {}


def arrive(ranks: Ranks, timeout_s: float, silent_s: float, clock: Clock) -> Meeting | None:
    """All ranks have come when this returns. They meet over the store of the default process group; where that cannot
    be cloned nothing is waited for, and there is no meeting.

    Rank 0 calls, and takes an answer to its call only; the others take a word that repeats their answer only. So what
    an earlier start of the same ranks left in the store, which may outlive torchrun's agents, is taken for nothing.

    Raises RestoreError (reason MISSING_RANKS) on every rank that came, naming those that did not within `timeout_s`.
    """
    if ranks.world_size == 1:
        return None
    try:
        store = _private.clone_default_store()
    except (ConfigError, RuntimeError) as error:
        log.debug("rank %d comes unannounced: %s", ranks.rank, error)
        return None
    assert ranks.group is not None
    members = ",".join(map(str, dist.get_process_group_ranks(ranks.group)))
    prefix = f"spot/arrival/{members}/{next(_meetings[members])}"
    channel = _channel(prefix, store, ranks, clock)
    call, missing = _call(channel, timeout_s) if ranks.rank == 0 else _answer(channel, timeout_s + _SLACK_S)
    if missing:
        raise _missing(f"rank {missing} did not come to the load within {timeout_s:g} s")
    channel = _channel(f"{prefix}/{call}", store, ranks, clock)
    return Meeting(channel, silent_s=silent_s, stuck_s=timeout_s)


def _channel(prefix: str, store: Any, ranks: Ranks, clock: Clock) -> Channel:
    prefixed = dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]
    return Channel(prefixed, rank=ranks.rank, world_size=ranks.world_size, clock=clock)


def _call(channel: Channel, timeout_s: float) -> tuple[str, str]:
    """Rank 0: its call, and the ranks that did not answer."""
    call, others = secrets.token_hex(8), range(1, channel.world_size)
    channel.set("call/0", call)
    try:
        channel.wait([f"{call}/here/{rank}" for rank in others], timeout_s)
        missing: tuple[int, ...] = ()
    except ChannelTimeout as late:
        missing = late.ranks
    came = [rank for rank in others if rank not in missing]
    answers = {rank: channel.get(f"{call}/here/{rank}") for rank in came}
    names = ", ".join(map(str, missing))
    channel.set("all/0", json.dumps({"call": call, "answers": answers, "missing": names}))
    heard = [f"{call}/heard/{rank}" for rank in came]
    if missing:
        with suppress(ChannelTimeout):
            channel.wait(heard, _HEARD_S)
    channel.delete(f"{call}/here/{rank}" for rank in came)
    return call, names


def _answer(channel: Channel, timeout_s: float) -> tuple[str, str]:
    """The others: the call that all answered, and the ranks that did not."""
    answer, call, pause = secrets.token_hex(8), "", threading.Event()
    end = channel.clock.monotonic() + timeout_s
    while channel.clock.monotonic() < end:
        if channel.has("call/0") and (now := channel.get("call/0")) != call:
            call = now
            channel.set(f"{call}/here/{channel.rank}", answer)
        if channel.has("all/0"):
            word = json.loads(channel.get("all/0"))
            if word["answers"].get(str(channel.rank)) == answer:
                channel.set(f"{word['call']}/heard/{channel.rank}", "")
                return word["call"], word["missing"]
        pause.wait(_PAUSE_S)
    return "", "0"


def _missing(why: str) -> RestoreError:
    return RestoreError(
        f"Nothing was loaded: {why}. Nothing was changed.", reason=Reason.MISSING_RANKS, hint=_HINT
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
            hint=_HINT,
        ) from late
    except ChannelError as dead:
        raise SaveError(
            f"Nothing was saved at step {step}: {dead}. Earlier generations are whole.",
            reason=Reason.MISSING_RANKS,
            hint="Its log, and that of its machine, may tell why.",
        ) from dead
