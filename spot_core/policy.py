"""What to do at a step boundary: continue, save, drain the save in flight, stop. Pure: no clock, no store, no thread.

Times are seconds; instants (`now`, deadlines) are unix seconds of the rank that decides.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from spot_core.signals.notice import Notice, NoticeKind

WINDOW_S = 25.0
"""What can be counted on after a stopping notice: 30 s of grace, less the way out."""
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
    """Stop: no save can finish any more (or none is needed, or none may be tried)."""

    @property
    def stops(self) -> bool:
        return self in (Kind.DRAIN, Kind.STOP_SAVE, Kind.STOP_NOW)


@dataclass(frozen=True)
class Decision:
    """One decision for one boundary.

    `reason` is a sentence for the log and the stop record. `deadline` (unix s) is until when saving may go on before
    the process has to leave; None without one.
    """

    kind: Kind
    reason: str = ""
    deadline: float | None = None


CONTINUE = Decision(Kind.CONTINUE)


@dataclass(frozen=True)
class Standing:
    """A notice that holds, and when (unix s) this run first heard of it."""

    notice: Notice
    received: float


def remember(standing: Sequence[Standing], notice: Notice, now: float) -> tuple[Standing, ...]:
    """`standing` with `notice` added, replaced (same id, the first reception counts), or taken back."""
    before = [s for s in standing if s.notice.id == notice.id]
    others = tuple(s for s in standing if s.notice.id != notice.id)
    if notice.kind is NoticeKind.CANCELLED:
        return others
    return (*others, Standing(notice, before[0].received if before else now))


@dataclass(frozen=True)
class Timing:
    """Measured 95th percentiles, from the start of a save to its full copy and to its commit; None before the first."""

    staged_s: float | None = None
    durable_s: float | None = None

    @property
    def save_s(self) -> float:
        """Time to allow for a whole save: the measured p95 and a quarter more, at least one second more."""
        if self.durable_s is None:
            return UNMEASURED_S
        durable = max(self.durable_s, self.staged_s or 0.0)
        return durable + max(1.0, durable / 4)


@dataclass(frozen=True)
class Saves:
    """Where saving stands.

    `interval_s` is the present time interval (None: steps decide), `step_due` says that this step is to be saved,
    `since_s` is the time since the last save *started* (or since the start of the life), `in_flight_s` the age of the
    save that is not committed yet (None: none is), `last_step` the step of the last save started (None: none was).
    `room` says that another save may begin while that one is in flight: it is at the local tier, and on its way on.
    `notified` holds the ids of the notices on which a save was already started.
    """

    interval_s: float | None
    since_s: float
    step_due: bool = False
    in_flight_s: float | None = None
    last_step: int | None = None
    notified: frozenset[str] = frozenset()
    room: bool = False


def decide(
    step: int,
    now: float,
    saves: Saves,
    standing: Sequence[Standing],
    timing: Timing,
    *,
    window_s: float = WINDOW_S,
) -> Decision:
    """The decision for the boundary after `step`.

    A stopping notice whose time has come (`stop_at`) stops the run: with a save if one can finish in what is usable,
    with the save in flight if that is all there is, else at once. Before that, a maintenance notice and an advisory one
    cause one early save each, and training goes on.
    """
    first = stopping(now, standing, timing, window_s)
    if first is not None:
        return _stop(step, now, usable_until(first, window_s), saves, timing, first.notice)
    for s in standing:
        early = s.notice.kind in (NoticeKind.ADVISORY, NoticeKind.MAINTENANCE)
        if early and s.notice.id not in saves.notified and saves.in_flight_s is None and saves.last_step != step:
            return Decision(Kind.SAVE, f"early save, {s.notice.kind.value} notice from {s.notice.source}")
    return _by_interval(step, saves)


def stopping(now: float, standing: Sequence[Standing], timing: Timing, window_s: float) -> Standing | None:
    """The notice that stops the run: of those whose time has come (`stop_at`) the one that leaves the least of it."""
    come = [s for s in standing if s.notice.stops and now >= stop_at(s, timing, window_s)]
    return min(come, key=lambda s: usable_until(s, window_s), default=None)


def usable_until(standing: Standing, window_s: float) -> float:
    """Until when saving may go on (unix s).

    The deadline less `EXIT_S`. A preemption is a best-effort promise, so no more than `window_s` after it was heard of
    is counted on, whatever deadline it names.
    """
    deadline = standing.notice.deadline
    if deadline is None:
        return standing.received + window_s
    if standing.notice.kind is NoticeKind.PREEMPTION:
        return min(deadline - EXIT_S, standing.received + window_s)
    return deadline - EXIT_S


def stop_at(standing: Standing, timing: Timing, window_s: float) -> float:
    """From when on (unix s) a stopping notice stops the run.

    A preemption: at once. Maintenance and a time limit keep their time, so training goes on until twice the window, or
    twice the time of a save if that is longer, remains.
    """
    if standing.notice.kind is NoticeKind.PREEMPTION or standing.notice.deadline is None:
        return standing.received
    return standing.notice.deadline - 2 * max(window_s, timing.save_s)


def _stop(step: int, now: float, until: float, saves: Saves, timing: Timing, notice: Notice) -> Decision:
    usable_s = until - now
    why = f"{notice.kind.value} notice from {notice.source}, {max(usable_s, 0.0):.1f} s usable"
    pending_s = 0.0 if saves.in_flight_s is None else max(timing.save_s - saves.in_flight_s, 0.0)
    if saves.last_step == step:
        if saves.in_flight_s is None:
            return Decision(Kind.STOP_NOW, f"{why}: step {step} is saved already", until)
        return Decision(Kind.DRAIN, f"{why}: the save of step {step} is in flight", until)
    if pending_s + timing.save_s <= usable_s:
        return Decision(Kind.STOP_SAVE, f"{why}: a save takes up to {timing.save_s:.1f} s", until)
    if saves.in_flight_s is not None and usable_s > 0:
        return Decision(Kind.DRAIN, f"{why}: only the save in flight can finish", until)
    return Decision(Kind.STOP_NOW, f"{why}: too short for a save of up to {timing.save_s:.1f} s", until)


def _by_interval(step: int, saves: Saves) -> Decision:
    time_due = saves.interval_s is not None and saves.since_s >= saves.interval_s
    if not (time_due or saves.step_due) or saves.last_step == step:
        return CONTINUE
    if saves.step_due:
        # Whoever counts steps wants that step: the save waits for the one in flight.
        return Decision(Kind.SAVE, "interval")
    if saves.in_flight_s is not None and not saves.room:
        return Decision(Kind.CONTINUE, f"due, but the last save is still in flight after {saves.in_flight_s:.1f} s")
    return Decision(Kind.SAVE, "interval")
