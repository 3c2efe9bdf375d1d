"""How a run that was told to stop leaves: what is in flight is finished if time allows, then all leave together."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from spot_core.errors import SpotError
from spot_core.launch.stoprecord import StopRecord
from spot_core.pytorch.lead import Lead
from spot_core.pytorch.live import Live

log = logging.getLogger(__name__)


class Parting:
    """Of one rank. `lead`: rank 0's. `left_s`: seconds until the deadline; `stop_s`: what a wait may take beyond it."""

    def __init__(self, live: Live, lead: Lead | None, left_s: Callable[[], float], stop_s: float) -> None:
        self._live, self._given_lead = live, lead
        self._left_s, self._stop_s = left_s, stop_s

    def leave(self, step: int, reason: str, code: int, *, drain_on: Callable[[Mapping[str, Any] | None], bool]) -> None:
        """Collective. `drain_on` sends what is only at the local tier on to the store. Errors are logged: nothing keeps
        a process on a machine that goes away."""
        live = self._live
        try:
            if live.local is not None:
                call = live.joint.tell(lambda: self._lead.last_call(self._left_s()), timeout_s=self._limit_s())
                drain_on(call["again"])
            word = live.joint.tell(
                lambda: self._lead.last_words(step, reason, left_s=self._left_s(), exit_code=code),
                timeout_s=self._limit_s(),
            )
            live.leave_word(StopRecord(**word["record"]))
            if word["saved"]:
                live.watcher.acknowledge()
            live.meet(self._limit_s())
        except (SpotError, OSError) as error:
            log.error("spot: rank %d leaves at step %d: %s", live.channel.rank, step, error)

    def _limit_s(self) -> float:
        return self._left_s() + self._stop_s

    @property
    def _lead(self) -> Lead:
        assert self._given_lead is not None, "only rank 0 leads"
        return self._given_lead
