"""What to do at a step boundary: continue, save, drain the save in flight, stop. Pure: no clock, no store, no thread.

Times are seconds; instants (`now`, deadlines) are unix seconds of the rank that decides.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

WINDOW_S = 25.0
"""What can be counted on after a stopping notice that names no deadline (30 s of grace, less the way out)."""
UNMEASURED_S = 10.0
"""Assumed time of a save before one was measured."""
EXIT_S = 1.0
"""Kept free at the end of the window: stop record, meeting the other ranks, leaving."""


class Kind(enum.Enum):
    """The verbs a decision can ask for."""

    CONTINUE = "continue"
    SAVE = "save"
    DRAIN = "drain"
    """Stop: let the save in flight finish, start none."""
    STOP_SAVE = "stop_save"
    """Stop: save this step first."""
    STOP_NOW = "stop_now"
    """Stop: no save can finish any more (or none may be tried)."""

    @property
    def stops(self) -> bool:
        return self in (Kind.DRAIN, Kind.STOP_SAVE, Kind.STOP_NOW)


@dataclass(frozen=True)
class Decision:
    """One decision for one boundary.

    `reason` is a sentence for the log and the stop record. `deadline` (unix s) is when the machine is expected to go;
    None without one.
    """

    kind: Kind
    reason: str = ""
    deadline: float | None = None


CONTINUE = Decision(Kind.CONTINUE)


@dataclass(frozen=True)
class Warning_:
    """What the policy needs of a notice: `stops` False is an advisory one; `deadline` None means "soon"."""

    id: str
    source: str
    stops: bool
    received: float
    deadline: float | None = None
    cancelled: bool = False


@dataclass(frozen=True)
class Timing:
    """Measured 95th percentiles: start of a save to full copy, start of a save to commit; None before the first."""

    staged_s: float | None = None
    durable_s: float | None = None

    @property
    def save_s(self) -> float:
        """Time to allow for a whole save: the measured p95 and a quarter more, at least one second more."""
        if self.durable_s is None:
            return UNMEASURED_S
        return self.durable_s + max(1.0, self.durable_s / 4)


@dataclass(frozen=True)
class Saves:
    """Where saving stands.

    `interval_s` is the present time interval (None: steps decide), `step_due` says that the step count asks for a save,
    `since_s` is the time since the last save *started* (or since the start of the life), `in_flight_s` the age of the
    save that is not committed yet (None: none is), `last_step` the step of the last save started (None: none was).
    `notified` holds the ids of the notices for which a save was already started.
    """

    interval_s: float | None
    since_s: float
    step_due: bool = False
    in_flight_s: float | None = None
    last_step: int | None = None
    notified: frozenset[str] = frozenset()


def decide(
    step: int,
    now: float,
    saves: Saves,
    warnings: Sequence[Warning_],
    timing: Timing,
    *,
    window_s: float = WINDOW_S,
) -> Decision:
    """The decision for the boundary after `step`.

    Stopping notices: while more than the window (or twice the time of a save, if longer) remains, one early save is
    taken and training goes on; then it stops, with a save if one can finish before the deadline less `EXIT_S`, with the
    save in flight if that is all there is, else at once. Advisory ones: one early save. Cancelled ones: nothing.
    """
    standing = [w for w in warnings if not w.cancelled]
    stopping = [w for w in standing if w.stops]
    if stopping:
        first = min(stopping, key=lambda w: deadline_of(w, window_s))
        deadline = deadline_of(first, window_s)
        if now >= stop_at(first, timing, window_s):
            return _stop(step, deadline - now - EXIT_S, saves, timing, first, deadline)
    fresh = [w for w in standing if w.id not in saves.notified]
    if fresh and saves.in_flight_s is None:
        if saves.last_step == step:
            return CONTINUE
        return Decision(Kind.SAVE, f"early save on a notice from {fresh[0].source}", fresh[0].deadline)
    return _by_interval(step, saves)


def deadline_of(warning: Warning_, window_s: float) -> float:
    """When the machine is expected to go; `window_s` after the notice when it names no time."""
    return warning.received + window_s if warning.deadline is None else warning.deadline


def stop_at(warning: Warning_, timing: Timing, window_s: float) -> float:
    """From when on a stopping notice stops the run."""
    return deadline_of(warning, window_s) - max(window_s, 2 * timing.save_s)


def _stop(step: int, usable_s: float, saves: Saves, timing: Timing, first: Warning_, deadline: float) -> Decision:
    why = f"notice from {first.source}, {usable_s:.1f} s usable"
    pending_s = 0.0
    if saves.in_flight_s is not None:
        pending_s = max(timing.save_s - saves.in_flight_s, 0.0)
    if saves.last_step == step:
        if saves.in_flight_s is None:
            return Decision(Kind.STOP_NOW, f"{why}: step {step} is saved already", deadline)
        return Decision(Kind.DRAIN, f"{why}: the save of step {step} is in flight", deadline)
    if pending_s + timing.save_s <= usable_s:
        return Decision(Kind.STOP_SAVE, f"{why}: a save takes up to {timing.save_s:.1f} s", deadline)
    if saves.in_flight_s is not None and usable_s > 0:
        return Decision(Kind.DRAIN, f"{why}: only the save in flight can finish", deadline)
    return Decision(Kind.STOP_NOW, f"{why}: too short for a save of up to {timing.save_s:.1f} s", deadline)


def _by_interval(step: int, saves: Saves) -> Decision:
    time_due = saves.interval_s is not None and saves.since_s >= saves.interval_s
    if not (time_due or saves.step_due) or saves.last_step == step:
        return CONTINUE
    if saves.in_flight_s is not None:
        return Decision(Kind.CONTINUE, f"due, but the last save is still in flight after {saves.in_flight_s:.1f} s")
    return Decision(Kind.SAVE, "interval")
