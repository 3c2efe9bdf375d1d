"""What a session has on every rank from `start` on, and how it is taken down."""

from __future__ import annotations

import atexit
import logging
import os
import socket
import weakref
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any, Protocol

from spot_core import signals
from spot_core.config import Settings
from spot_core.generation import Committed
from spot_core.launch.stoprecord import StopRecord, leave_note
from spot_core.pytorch.agree import Agreement, FreezeAgreement
from spot_core.pytorch.bases import Baseline, Held, Key
from spot_core.pytorch.bulletin import Bulletin
from spot_core.pytorch.channel import Channel
from spot_core.pytorch.committer import Patience
from spot_core.pytorch.joint import Joint
from spot_core.pytorch.lagged import LaggedAgreement
from spot_core.pytorch.plan import Planner
from spot_core.pytorch.pulse import Pulse
from spot_core.pytorch.ranks import Ranks
from spot_core.pytorch.relay import Relay, Share
from spot_core.pytorch.resplit import Resplitter
from spot_core.pytorch.stage import Stager
from spot_core.record import RunRecord
from spot_core.run import Run, Writer
from spot_core.tiers import LocalTier
from spot_core.writer import WriterClient

log = logging.getLogger(__name__)


@dataclass
class Live:
    life: int
    channel: Channel
    pulse: Pulse
    joint: Joint
    bulletin: Bulletin
    agreement: Agreement
    client: WriterClient
    stager: Stager
    planner: Planner
    watcher: signals.Watcher
    splitter: Resplitter
    relay: Relay
    baseline: Baseline
    local: LocalTier | None = None
    newest: Committed | None = None
    """The newest generation that this life committed to the run's store, as all ranks know it."""
    tried: bool = False
    """A snapshot was made or rehearsed."""
    given: Mapping[str, Any] | None = None
    """The state of the snapshot under way, kept until its tensors are copied: to free thousands of tensors right after
    the save call means to ask for the interpreter as often, while the copying threads have just begun to."""
    shares: list[Share] = field(default_factory=list)
    """This rank's parts of the last saves."""

    @classmethod
    def open(
        cls,
        run: Run,
        settings: Settings,
        ranks: Ranks,
        life: int,
        channel: Channel,
        *,
        sources: Sequence[signals.Source] | None,
        patience: Patience,
        notify: Callable[[signals.Notice], None],
        local: LocalTier | None = None,
        held: Mapping[Key, Held] | None = None,
    ) -> Live:
        """Not collective. `sources` None: those that `settings.sources` names. Starts no watching yet.

        `held`: what saves may refer to of the generation that this life goes on from.
        """
        if sources is None:
            sources = signals.sources(settings.sources, grace_s=settings.grace_s, clock=run.clock)
        client = WriterClient.start(
            run.store,
            mode="thread" if settings.writer == "thread" else "process",
            local=local,
            bytes_s=None if settings.max_upload_mb_s is None else settings.max_upload_mb_s * 1e6,
        )
        at_once = settings.writers_at_once
        pulse = Pulse(channel, silent_s=patience.silent_s)
        pulse.start()
        return cls(
            life,
            channel,
            pulse,
            Joint(channel, timeout_s=patience.joint_s, pulse=pulse),
            Bulletin(channel),
            _agreement(ranks, channel, patience),
            client,
            Stager(client),
            Planner(ranks.group),
            signals.Watcher(sources, clock=run.clock, on_notice=notify),
            Resplitter(),
            Relay(client, channel, tiered=local is not None, at_once=at_once, wait_s=patience.write_s),
            # At the local tier every generation is whole; what is there already is found out on the way to the store.
            Baseline(held, refers=local is None),
            local,
        )

    def leave_word(self, record: StopRecord) -> None:
        """For the launcher, and for `kubectl describe pod`. Raises OSError."""
        signals.write_termination_log(f"spot: stopped at step {record.step}: {record.reason}")
        leave_note(record)

    def meet(self, timeout_s: float) -> None:
        """Leave together: torchrun ends the peers of a process that leaves early. Raises ChannelTimeout."""
        self.channel.set(f"stop/{self.channel.rank}", "")
        self.channel.wait([f"stop/{rank}" for rank in range(self.channel.world_size)], timeout_s)

    def quiet(self) -> None:
        """No more notices, no more agreements."""
        self.watcher.close()
        self.agreement.close()
        self.pulse.close()

    def close(self, timeout_s: float) -> None:
        """End the writer; this rank's parts that are still being written get `timeout_s`."""
        futures = [future for share in self.shares for future in (share.landed, share.durable)]
        wait([future for future in futures if future is not None], timeout_s)
        self.relay.clear()
        self.given = None
        self.stager.close()
        self.splitter.forget()
        self.client.close()


def _agreement(ranks: Ranks, channel: Channel, patience: Patience) -> Agreement:
    """The cheap one, unless its store would be rank 0's process, which may be the one that has to go first."""
    if not channel.hosted:
        if ranks.rank == 0 and ranks.world_size > 1:
            log.info("spot: the ranks agree over a clone of the store that they met over")
        return FreezeAgreement(channel, clock=channel.clock)
    if ranks.rank == 0:
        log.warning(
            "spot: the store that the ranks met over cannot be cloned: they agree by an all-reduce at every step, and "
            "report their saves over a store that rank 0 hosts"
        )
    assert ranks.group is not None
    return LaggedAgreement(ranks.group, patient_s=patience.joint_s, clock=channel.clock)


def claim_life(
    run: Run, settings: Settings, ranks: Ranks, resumed: Committed | None
) -> tuple[int, list[Writer], LocalTier | None, bool]:
    """Collective: the next life's number, its writer (on rank 0 only), this machine's local tier, entered; and whether
    saves may refer to what `resumed` holds.
    """
    writers: list[Writer] = []

    def claim() -> tuple[int, RunRecord | None, dict[str, Any], bool]:
        info = claim_info(ranks.world_size, resumed)
        writers.append(run.claim(info=info, continues=resumed if settings.local is None else None))
        record = None if settings.local is None else run.record()
        return writers[0].life, record, info, bool(writers[0].lendable)

    life, record, info, refers = ranks.from_first(claim)
    if record is None or settings.local is None:
        return life, writers, None, refers
    local = LocalTier.open(settings.local, record.run_id, run.store)
    ranks.together(lambda: local.enter(record, life, info))
    return life, writers, local, False


def claim_info(world_size: int, resumed: Committed | None) -> dict[str, Any]:
    """What a claim of a life says for people to read."""
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "world_size": world_size,
        "resumed": None if resumed is None else resumed.id.name,
    }


class _Closes(Protocol):
    def close(self) -> None: ...


def close_at_exit(session: _Closes) -> None:
    """A session that nobody closed still ends its threads before the interpreter does, unless it is gone by then."""
    known = weakref.ref(session)

    def close() -> None:
        found = known()
        if found is not None:
            found.close()

    atexit.register(close)
    weakref.finalize(session, atexit.unregister, close)
