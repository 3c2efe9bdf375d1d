"""How long to train between two saves: what the user may write, and the optimum in three forms. Pure functions.

Model, for failures that come as a Poisson process with mean time between them M, a save that blocks for C and a restart
that takes R (all in seconds): with a save after every tau seconds of work the expected wall time per useful second is
``exp(R/M) * M * (exp((tau + C)/M) - 1) / tau``. R does not move the optimum. For a save that is written in the
background, C is only the time the loop stands still.

When a share r of the losses is announced early enough to finish a save, only the others lose work, which acts like a
longer mean time M/(1 - r).

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval", CACM 17(9), 1974;
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", FGCS 22(3), 2006.
"""

from __future__ import annotations

import enum
import math
import re
from dataclasses import dataclass

from spot_core.errors import ConfigError

ACCEPTED = '"auto", a duration ("90s", "10min", "1.5h"), a count ("500 steps"), a bound ("lose at most 10min")'

_UNIT_S = {"s": 1.0, "sec": 1.0, "second": 1.0, "m": 60.0, "min": 60.0, "minute": 60.0, "h": 3600.0, "hour": 3600.0}
_AMOUNT = re.compile(r"(?P<number>[-+]?\d+(?:\.\d+)?)\s*(?P<unit>[a-z]+)")


class Rule(enum.Enum):
    AUTO = "auto"
    SECONDS = "seconds"
    STEPS = "steps"
    LOSE_AT_MOST = "lose at most"


@dataclass(frozen=True)
class Interval:
    """A parsed interval; `value` is seconds, steps, or 0 for AUTO."""

    rule: Rule
    value: float = 0.0

    def passes(self, before: int | None, step: int) -> bool:
        """Whether a multiple of a number of steps was reached since `before` (None: nothing is known of before)."""
        every = int(self.value)
        return step % every == 0 if before is None else step // every > before // every

    def __str__(self) -> str:
        if self.rule is Rule.AUTO:
            return "auto"
        if self.rule is Rule.STEPS:
            return f"{self.value:.0f} steps"
        return f"{'lose at most ' if self.rule is Rule.LOSE_AT_MOST else ''}{self.value:g}s"


def parse_interval(text: str) -> Interval:
    """Read what a user wrote; ConfigError says what is accepted."""
    if not isinstance(text, str):
        raise ConfigError(f"interval {text!r} is not a text. Accepted: {ACCEPTED}.")
    words = text.strip().lower()
    if words == "auto":
        return Interval(Rule.AUTO)
    rule = Rule.SECONDS
    bound = re.fullmatch(r"lose\s+at\s+most\s+(.*)", words)
    if bound:
        words, rule = bound.group(1), Rule.LOSE_AT_MOST
    amount = _AMOUNT.fullmatch(words)
    if amount is None:
        raise ConfigError(f"interval {text!r} cannot be read. Accepted: {ACCEPTED}.")
    number, unit = float(amount["number"]), amount["unit"]
    if unit not in _UNIT_S:
        unit = unit.removesuffix("s")  # "2 hours", "90 secs"; a lone "s" is a unit already
    if unit == "step":
        if rule is Rule.LOSE_AT_MOST or number != int(number):
            raise ConfigError(f"interval {text!r}: steps are a whole number and no bound. Accepted: {ACCEPTED}.")
        rule, value = Rule.STEPS, number
    elif unit in _UNIT_S:
        value = number * _UNIT_S[unit]
    else:
        raise ConfigError(f"interval {text!r} has the unknown unit {amount['unit']!r}. Accepted: {ACCEPTED}.")
    if value <= 0:
        raise ConfigError(f"interval {text!r} must be above zero. Accepted: {ACCEPTED}.")
    return Interval(rule, value)


def young(cost_s: float, mtti_s: float, announced: float = 0.0) -> float:
    """Young's first order optimum sqrt(2 C M/(1 - r)), in seconds of work between saves."""
    cost_s, mtti_s = _checked(cost_s, mtti_s, announced)
    return math.sqrt(2 * cost_s * mtti_s)


def daly(cost_s: float, mtti_s: float, announced: float = 0.0) -> float:
    """Daly's higher order optimum; M itself once C reaches 2 M."""
    cost_s, mtti_s = _checked(cost_s, mtti_s, announced)
    if cost_s >= 2 * mtti_s:
        return mtti_s
    ratio = cost_s / (2 * mtti_s)
    return math.sqrt(2 * cost_s * mtti_s) * (1 + math.sqrt(ratio) / 3 + ratio / 9) - cost_s


def exact(cost_s: float, mtti_s: float, announced: float = 0.0) -> float:
    """The optimum of the model itself: M (1 + W0(-exp(-C/M - 1))), W0 being Lambert's function.

    With x = tau/M it is the root of log(1 - x) + x + C/M = 0 in (0, 1). That function falls and is concave, so Newton's
    method from a point right of the root comes down to it and never passes it.
    """
    cost_s, mtti_s = _checked(cost_s, mtti_s, announced)
    ratio = cost_s / mtti_s
    # Young's value and 1 - exp(-1 - C/M) are both right of the root.
    x = min(math.sqrt(2 * ratio), -math.expm1(-1 - ratio))
    while True:
        remaining = 1 - x
        if remaining <= 0 or x <= 0:  # C beyond some 35 M, or so small that it vanishes beside M
            return x * mtti_s
        step = (math.log1p(-x) + x + ratio) * remaining / x
        if step >= 0 or -step < 1e-12 * x:
            return x * mtti_s
        x += step


def overhead(tau_s: float, cost_s: float, mtti_s: float, restart_s: float = 0.0) -> float:
    """Expected wall time per useful second, less one, in the exponential model (0.1 = 10 % more)."""
    exponent = (tau_s + cost_s) / mtti_s
    if exponent > 700:
        return math.inf
    return math.exp(restart_s / mtti_s) * mtti_s * math.expm1(exponent) / tau_s - 1


def waste(tau_s: float, cost_s: float, mtti_s: float, restart_s: float = 0.0) -> float:
    """First order share of time lost: C/tau for saving, tau/(2 M) for repeated work, R/M for restarts."""
    return cost_s / tau_s + tau_s / (2 * mtti_s) + restart_s / mtti_s


def _checked(cost_s: float, mtti_s: float, announced: float) -> tuple[float, float]:
    if cost_s <= 0 or mtti_s <= 0 or not 0 <= announced < 1:
        raise ValueError(
            f"cost_s={cost_s} and mtti_s={mtti_s} must be above zero, announced={announced} in [0, 1): "
            "a save that costs nothing has no optimum interval"
        )
    return cost_s, mtti_s / (1 - announced)
