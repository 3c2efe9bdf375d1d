"""Lightning's signal handling, kept from doing harm while a fit trains.

Lightning's SIGTERM handler runs a collective inside the handler, asks all ranks about it at every batch, and lets the
process end with code 0. From before it registers its handler until the fit is over, its part in it only notes the
signal; the session's source takes over when training starts, tells all ranks, and they stop together.
A handler that was there before Lightning's still runs.
"""

from __future__ import annotations

from typing import Any

from lightning_spot import _compat
from spot_core.clock import SYSTEM_CLOCK
from spot_core.patches import Patches
from spot_core.pytorch.session import Session
from spot_core.signals import Notice, NoticeKind


class Stopping:
    """One fit's."""

    def __init__(self, trainer: Any, grace_s: float) -> None:
        self._trainer = trainer
        self._grace_s = grace_s
        self._received: float | None = None

    def take_over(self, patches: Patches) -> None:
        """Before Lightning registers its handlers."""
        patches.around(*_compat.signal_owner(self._trainer), lambda _: self._note)
        owner, name = _compat.signal_poll_owner(self._trainer)
        if hasattr(owner, name):
            patches.around(owner, name, lambda _: _nothing)

    def _note(self, signum: int, frame: Any) -> None:
        if self._received is None:
            self._received = SYSTEM_CLOCK.now()

    def training_starts(self, session: Session) -> None:
        """A signal that came while the fit was being set up, when nothing could be saved yet, counts now."""
        if self._received is not None:
            deadline = self._received + self._grace_s
            text = "SIGTERM received before training started"
            session.notify(Notice("signal:sigterm", NoticeKind.PREEMPTION, "sigterm", deadline, text))


def _nothing(*args: Any) -> None:
    """Asks nobody: the agreement of the session does, without a collective per batch."""
