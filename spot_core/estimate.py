"""What the run has measured about itself, and the save interval that follows from it. Plain numbers, no clock.

Mean time to interruption: interruptions of the *job* (not of nodes) are counted with a Gamma(a, b) prior on their
rate, so the estimate is (b + T)/(a + k) for k interruptions in T seconds. The first order cost of an interval is linear
in the rate, hence plugging in the posterior mean is optimal to first order. The default prior: one loss in six hours.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from spot_core.interval import Interval, Rule, exact

FIRST_SAVE_S = 30.0
"""With "auto", the first save of a run that has measured nothing: early, so that its cost is known."""
UNMEASURED_S = 300.0
"""With "auto", the interval while a first save has not told its cost yet."""
SHORTEST_S = 10.0
"""With "auto", never save more often: below that, what blocking time does not show (bandwidth, requests) dominates."""
LONGEST_S = 3600.0
RECENT = 20
_WORLD_EXPONENT = 0.5
"""Losses are correlated: in traces of 4-node and 16-node jobs the job's rate grows with about the 0.7th to 0.2nd power
of the number of nodes, so history at another size is worth its rate times (ratio of sizes) ** 0.5."""


@dataclass(frozen=True)
class PastLife:
    """One earlier life: how long it ran, whether an interruption ended it, and whether that one cost no work.

    `saved` means announced *and* completed: a stop record says the last step was saved.
    """

    seconds: float
    interrupted: bool
    saved: bool = False
    world_size: int = 1


@dataclass(frozen=True)
class Prior:
    """Gamma prior of the loss rate of one pool: `losses` seen in `seconds`."""

    losses: float = 1.0
    seconds: float = 6 * 3600.0


@dataclass
class Estimator:
    """Costs of the last saves and the rate of interruptions, for one world size.

    Feed it with `saved` after each save; make a new one when the world size changes (costs are then unknown again, the
    history is rescaled).
    """

    world_size: int = 1
    history: Sequence[PastLife] = ()
    prior: Prior = field(default_factory=Prior)
    _blocked: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    _staged: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)
    _durable: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT), init=False)

    def __post_init__(self) -> None:
        # A loss rate seen at another size is carried over by stretching the time it was seen in.
        stretched = (life.seconds * (life.world_size / self.world_size) ** _WORLD_EXPONENT for life in self.history)
        self._seen_s = self.prior.seconds + sum(stretched)
        self._interrupted = sum(life.interrupted for life in self.history)
        self._saved = sum(life.interrupted and life.saved for life in self.history)
        self._losses = self.prior.losses + self._interrupted

    def saved(
        self, *, blocked_s: float | None = None, staged_s: float | None = None, durable_s: float | None = None
    ) -> None:
        """Note one save: time the loop stood still, time to a full copy, time to the commit (each may come later)."""
        for series, value in ((self._blocked, blocked_s), (self._staged, staged_s), (self._durable, durable_s)):
            if value is not None:
                series.append(value)

    @property
    def cost_s(self) -> float | None:
        """C: median blocking time of the recent saves; None before the first."""
        return statistics.median(self._blocked) if self._blocked else None

    @property
    def staged_p95_s(self) -> float | None:
        return _p95(self._staged)

    @property
    def durable_p95_s(self) -> float | None:
        """95th percentile of the recent times from the start of a save to its commit; None before the first."""
        return _p95(self._durable)

    def mtti_s(self, uptime_s: float = 0.0) -> float:
        """M for this world size; `uptime_s` of the present life counts as time without a loss."""
        return float((self._seen_s + uptime_s) / self._losses)

    @property
    def announced(self) -> float:
        """r: share of the interruptions that were announced and saved; cautious while few were seen."""
        return self._saved / (self._interrupted + 2)

    def tau_s(self, uptime_s: float = 0.0) -> float | None:
        """Optimum for the measured C and M, unbounded; None before C is known."""
        cost = self.cost_s
        return None if cost is None else exact(max(cost, 1e-6), self.mtti_s(uptime_s), self.announced)

    def holding_s(self) -> float:
        """The shortest interval that the store keeps up with: one save in flight, with a tenth to spare."""
        return 1.1 * (self.durable_p95_s or 0.0)

    def interval_s(self, interval: Interval, uptime_s: float = 0.0) -> float | None:
        """Seconds from the start of one save to the start of the next; None when steps decide."""
        if interval.rule is Rule.STEPS:
            return None
        if interval.rule is Rule.SECONDS:
            return interval.value
        if interval.rule is Rule.LOSE_AT_MOST:
            # Just before a commit, the newest generation is one interval plus one write old.
            return max(interval.value - (self.durable_p95_s or 0.0), interval.value / 2)
        tau = self.tau_s(uptime_s)
        if tau is None:
            return FIRST_SAVE_S
        if self.durable_p95_s is None:
            return UNMEASURED_S
        return min(max(tau, self.holding_s(), SHORTEST_S), max(LONGEST_S, self.holding_s()))


def _p95(values: Sequence[float]) -> float | None:
    """The 95th percentile by nearest rank: the largest of up to 20 values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]
