"""The preflight of a session: rank 0 asks the store, every rank its own machine; one failure stops all ranks."""

from __future__ import annotations

import logging
import os

from spot_core import memory
from spot_core.config import Settings
from spot_core.interval import Rule, parse_interval
from spot_core.preflight import (
    Check,
    Rate,
    Report,
    examine_folder,
    examine_memory,
    examine_pace,
    examine_space,
    examine_store,
    folder_of,
)
from spot_core.pytorch.ranks import Ranks
from spot_core.run import Run

log = logging.getLogger(__name__)


class Readiness:
    """`access` before anything is read or loaded, `room` when the size of a snapshot is known; each once per life."""

    def __init__(self, run: Run, settings: Settings, ranks: Ranks) -> None:
        self._run, self._settings, self._ranks = run, settings, ranks
        self._checks: list[Check] = []
        self._rate: Rate | None = None
        self._asked = not settings.preflight

    def access(self) -> None:
        """Collective. Raises, on every rank, AccessError, StoreError or ConfigError for what would stop the run."""
        if self._asked:
            return
        self._asked = True
        report = self._ranks.from_first(self._ask_store)
        self._checks = list(report.checks)
        if self._ranks.rank == 0 and report.failed:
            log.error("spot: preflight of %s\n%s", self._run.uri, report.text())
        report.raise_failed()

    def room(self, state_bytes: int | None) -> None:
        """Collective. `state_bytes`: this rank's snapshot, None when it is not known. Raises as `access`."""
        if not self._settings.preflight:
            return
        self.access()
        local = self._look_at_local_tier(state_bytes)
        if state_bytes is not None:
            local += self._look_around(state_bytes)
        report = Report(self._run.uri, (*self._checks, *local))
        if self._ranks.rank == 0 or report.failed:
            # A warning, since these are shown where nobody has set up logging.
            log.warning("spot: preflight of %s\n%s", self._run.uri, report.text())
        self._ranks.together(report.raise_failed)

    def _ask_store(self) -> Report:
        checks, self._rate = examine_store(self._run)
        return Report(self._run.uri, tuple(checks))

    def _look_at_local_tier(self, state_bytes: int | None) -> list[Check]:
        if self._settings.local is None or os.environ.get("LOCAL_RANK", "0") != "0":
            return []
        machine_bytes = (state_bytes or 0) * memory.local_world_size()
        return [examine_folder("local tier", self._settings.local, machine_bytes, 1)]

    def _look_around(self, state_bytes: int) -> list[Check]:
        here = memory.local_world_size()
        checks = [examine_memory(state_bytes * here, memory.available_bytes(), memory.total_bytes())]
        folder = folder_of(self._run.store)
        if folder is not None and os.environ.get("LOCAL_RANK", "0") == "0":
            total = state_bytes * self._ranks.world_size
            checks.append(examine_space("space", folder, total, self._settings.keep))
        if self._rate is not None:  # on rank 0
            interval = parse_interval(self._settings.interval)
            interval_s = interval.value if interval.rule in (Rule.SECONDS, Rule.LOSE_AT_MOST) else None
            checks.append(
                examine_pace(state_bytes * here, self._rate, window_s=self._settings.window_s, interval_s=interval_s)
            )
        return checks
