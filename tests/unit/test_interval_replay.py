"""The online policy replayed on availability traces, against fixed intervals.

The traces are drawn here, shaped like public spot traces: uptimes with a heavy tail (mean 2 to 9 times the median) that
come in calm and stormy spells, 2 to 45 days long, pools from one loss in half an hour to one in a day.
"""

import math
import random
from statistics import mean, median

import pytest

from spot_core.estimate import Estimator, PastLife
from spot_core.interval import parse_interval

COST_S, RESTART_S = 30.0, 120.0
FIXED_S = [60 * m for m in (1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 25, 30, 40, 50, 60, 75, 90, 120, 180, 240)]
DAY = 86400.0


def trace(seed):
    """Uptimes in seconds until the days are used up."""
    rng = random.Random(seed)
    days = rng.uniform(2, 45)
    typical = math.exp(rng.uniform(math.log(0.5), math.log(24))) * 3600
    sigma = rng.uniform(1.2, 2.0)
    left, storm, uptimes = days * DAY, False, []
    while left > 0:
        storm = rng.random() < (0.7 if storm else 0.1)  # spells: a loss makes the next one more likely
        scale = typical * (0.15 if storm else 1.0) * math.exp(-(sigma**2) / 2)
        up = min(max(rng.lognormvariate(math.log(scale), sigma), 1.0), left)
        uptimes.append(up)
        left -= up
    return uptimes


def useful_fixed(uptimes, tau):
    return sum(max(0, int((up - RESTART_S) // (tau + COST_S))) * tau for up in uptimes) / sum(uptimes)


def useful_online(uptimes):
    auto, history, useful = parse_interval("auto"), [], 0.0
    for up in uptimes:
        estimator = Estimator(history=history)
        if history:  # a later life knows the costs from the manifest of the earlier one
            estimator.saved(blocked_s=COST_S, durable_s=COST_S)
        now = RESTART_S
        while True:
            tau = estimator.interval_s(auto, now)
            if now + tau + COST_S > up:
                break
            now += tau + COST_S
            useful += tau
            estimator.saved(blocked_s=COST_S, durable_s=COST_S)
        history = [*history, PastLife(up, interrupted=True)]
    return useful / sum(uptimes)


@pytest.fixture(scope="module")
def replayed():
    traces = [trace(seed) for seed in range(30)]
    fixed = {tau: [useful_fixed(t, tau) for t in traces] for tau in FIXED_S}
    hindsight = [max(fixed[tau][i] for tau in FIXED_S) for i in range(len(traces))]
    return traces, fixed, hindsight, [useful_online(t) for t in traces]


def test_traces_are_shaped_like_the_real_ones(replayed):
    heavy = [mean(t) / median(t) for t in replayed[0] if len(t) > 20]
    assert 2 <= median(heavy) <= 9
    assert min(sum(t) for t in replayed[0]) >= 2 * DAY


def test_online_is_within_1_5_percent_of_the_best_fixed_interval_in_hindsight(replayed):
    _, _, hindsight, online = replayed
    assert mean(online) >= mean(hindsight) - 0.015


def test_online_beats_every_fixed_interval_a_user_would_pick(replayed):
    _, fixed, _, online = replayed
    assert mean(online) > mean(fixed[1800]) + 0.005
    assert mean(online) > mean(fixed[3600]) + 0.02
    assert sum(o >= f for o, f in zip(online, fixed[1800], strict=True)) >= 24


def test_announced_losses_lengthen_the_interval():
    """Half of the losses announced and saved: intervals grow by about sqrt(2), which costs nothing there."""
    plain = Estimator(history=[PastLife(3600, True)] * 40)
    warned = Estimator(history=[PastLife(3600, True, saved=i % 2 == 0) for i in range(40)])
    for estimator in (plain, warned):
        estimator.saved(blocked_s=COST_S, durable_s=COST_S)
    assert warned.tau_s() / plain.tau_s() == pytest.approx(math.sqrt(1 / (1 - 20 / 42)), rel=0.03)
