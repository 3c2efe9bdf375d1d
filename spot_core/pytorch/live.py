"""What a session has on every rank from `start` on, and how it is taken down."""

from __future__ import annotations

import atexit
import os
import socket
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, Protocol

from spot_core import signals
from spot_core.config import Settings
from spot_core.errors import SpotError
from spot_core.generation import Committed
from spot_core.launch.stoprecord import StopRecord, leave_note
from spot_core.manifest import Part
from spot_core.pytorch.agree import Agreement, FreezeAgreement
from spot_core.pytorch.channel import Channel
from spot_core.pytorch.committer import Patience
from spot_core.pytorch.joint import Joint
from spot_core.pytorch.plan import Planner
from spot_core.pytorch.ranks import Ranks
from spot_core.pytorch.resplit import Resplitter
from spot_core.pytorch.stage import Stager
from spot_core.run import Run
from spot_core.writer import WriterClient


@dataclass
class Live:
    life: int
    channel: Channel
    joint: Joint
    agreement: Agreement
    client: WriterClient
    stager: Stager
    planner: Planner
    watcher: signals.Watcher
    splitter: Resplitter
    part: Future[Part] | SpotError | None = None
    """This rank's share of the last save."""

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
    ) -> Live:
        """Not collective. `sources` None: those that `settings.sources` names. Starts no watching yet."""
        if sources is None:
            sources = signals.sources(settings.sources, grace_s=settings.grace_s, clock=run.clock)
        client = WriterClient.start(run.store, mode="thread" if settings.writer == "thread" else "process")
        return cls(
            life,
            channel,
            Joint(channel, timeout_s=patience.joint_s),
            FreezeAgreement(channel, clock=run.clock),
            client,
            Stager(client),
            Planner(ranks.group),
            signals.Watcher(sources, clock=run.clock, on_notice=notify),
            Resplitter(),
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

    def close(self, timeout_s: float) -> None:
        """End the writer; this rank's part, if still being written, gets `timeout_s`."""
        if isinstance(self.part, Future):
            wait([self.part], timeout_s)
        self.stager.close()
        self.splitter.forget()
        self.client.close()


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
