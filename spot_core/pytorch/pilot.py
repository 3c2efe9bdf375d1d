"""Rank 0's eye on the clock and on the notices: when to look together with all ranks, and what to decide then.

Holds what `policy.decide` needs and asks it; has no threads, no store and no ranks of its own.
"""

from __future__ import annotations

import logging
import math

from spot_core import policy
from spot_core.clock import Clock
from spot_core.estimate import Estimator
from spot_core.interval import Interval, Rule
from spot_core.policy import Decision, Kind, Saves, Standing, Timing
from spot_core.signals.notice import Notice

log = logging.getLogger(__name__)


class Pilot:
    """One life's decisions. `in_flight_s` is everywhere the age of the save not committed yet, None without one."""

    def __init__(self, interval: Interval, estimator: Estimator, clock: Clock, *, window_s: float) -> None:
        self._interval = interval
        self.estimator = estimator
        self._clock = clock
        self._window_s = window_s
        self.tiered = False
        """Whether saves are safe locally first."""
        self._started = clock.monotonic()
        self._last_save = self._started
        self._last_step: int | None = None
        self._standing: tuple[Standing, ...] = ()
        self._notified: frozenset[str] = frozenset()
        self._hasten = False
        self._said_slow_for: int | None = None
        self._said_bound = False
        self._asked = False
        self._next_save = self._next_stop = math.inf
        self.replan()

    @property
    def uptime_s(self) -> float:
        return self._clock.monotonic() - self._started

    @property
    def timing(self) -> Timing:
        return Timing(self.estimator.staged_p95_s, self.estimator.durable_p95_s)

    def replan(self) -> None:
        """Work out anew when to look; after each look and each end of a save."""
        now, unix = self._clock.monotonic(), self._clock.now()
        interval_s = self.estimator.interval_s(self._interval, self.uptime_s)
        early = any(not s.notice.stops and s.notice.id not in self._notified for s in self._standing)
        if early or self._hasten:
            self._next_save = now
        else:
            self._next_save = math.inf if interval_s is None else self._last_save + interval_s
        stops = [policy.stop_at(s, self.timing, self._window_s) for s in self._standing if s.notice.stops]
        self._next_stop = now + (min(stops) - unix) if stops else math.inf
        self._check_bound(interval_s)

    def wants_a_look(self, in_flight_s: float | None, *, room: bool = False, stops_only: bool = False) -> bool:
        """Whether to call all ranks together now. True once, until `decide` or `gave_up`.

        `room`: another save may begin while the one in flight is on its way from the local tier.
        """
        now = self._clock.monotonic()
        if stops_only and now < self._next_stop:
            return False
        if self._asked or now < min(self._next_save, self._next_stop):
            return False
        if now < self._next_stop and in_flight_s is not None and not self._hasten:
            self._say_slow(in_flight_s)
            if not room:
                return False
        self._asked = True
        return True

    def heard(self, notice: Notice) -> None:
        self._standing = policy.remember(self._standing, notice, self._clock.now())

    def stop_until(self) -> float | None:
        """Until when (unix s) saving may go on, once a notice stops the run; None while none does."""
        first = policy.stopping(self._clock.now(), self._standing, self.timing, self._window_s)
        return None if first is None else policy.usable_until(first, self._window_s)

    def decide(self, step: int, *, step_due: bool, in_flight_s: float | None, room: bool = False) -> Decision:
        """The decision for this boundary, on behalf of all ranks."""
        saves = Saves(
            interval_s=self.estimator.interval_s(self._interval, self.uptime_s),
            since_s=self._clock.monotonic() - self._last_save,
            step_due=step_due,
            in_flight_s=in_flight_s,
            last_step=self._last_step,
            notified=self._notified,
            room=room,
        )
        decision = policy.decide(step, self._clock.now(), saves, self._standing, self.timing, window_s=self._window_s)
        if in_flight_s is not None and (step_due or (decision.kind is Kind.CONTINUE and decision.reason)):
            self._say_slow(in_flight_s)
        self._asked = self._hasten = False
        self.replan()
        return decision

    def gave_up(self) -> None:
        """The ranks could not be called together; try again after another interval."""
        self._asked = False
        self._last_save = self._clock.monotonic()
        self.replan()

    def hasten(self) -> None:
        """Look at the next boundary: a save failed in a way that every rank has to hear of."""
        self._hasten = True
        self.replan()

    def save_started(self, step: int, began: float) -> None:
        """`began`: monotonic seconds."""
        self._last_save = began
        self._last_step = step
        self._hasten = False
        # Whatever was announced before this save began has had its early save.
        self._notified = frozenset(s.notice.id for s in self._standing)
        self.replan()

    def _say_slow(self, in_flight_s: float) -> None:
        """Once per save: the store does not keep up with the interval."""
        if self._said_slow_for == self._last_step:
            return
        self._said_slow_for = self._last_step
        holds_s = max(self.estimator.holding_s(), 1.1 * in_flight_s)
        log.warning(
            "spot: the save of step %s is still being written after %.1f s when the next one is due (interval %s); the "
            "next one %s. An interval of %.0f s or more would hold.",
            self._last_step,
            in_flight_s,
            self._interval,
            "stays at the local tier" if self.tiered else "waits for it",
            math.ceil(holds_s),
        )

    def _check_bound(self, interval_s: float | None) -> None:
        durable_s = self.estimator.durable_p95_s
        if self._said_bound or self._interval.rule is not Rule.LOSE_AT_MOST or None in (interval_s, durable_s):
            return
        assert interval_s is not None
        assert durable_s is not None
        if interval_s + durable_s > self._interval.value * 1.001:
            self._said_bound = True
            log.warning(
                "spot: %r cannot be kept: a save takes up to %.1f s to be safe, so up to %.0f s can be lost",
                str(self._interval),
                durable_s,
                interval_s + durable_s,
            )
