"""The estimator: medians, the Gamma prior, history across lives and sizes, and what "auto" makes of them."""

import pytest

from spot_core.estimate import FIRST_SAVE_S, SHORTEST_S, UNMEASURED_S, Estimator, PastLife, Prior
from spot_core.interval import Interval, Rule, exact, parse_interval

HOUR = 3600.0


def measured(blocked, durable, **kw):
    estimator = Estimator(**kw)
    for b, d in zip(blocked, durable, strict=True):
        estimator.saved(blocked_s=b, staged_s=b, durable_s=d)
    return estimator


def test_cost_is_the_median_of_the_last_twenty():
    estimator = measured([100.0] * 30 + [1.0] * 11 + [9.0] * 9, [1.0] * 50)
    assert estimator.cost_s == 1.0


def test_durable_p95_keeps_the_slow_one():
    estimator = measured([1.0] * 20, [2.0] * 19 + [30.0])
    assert estimator.durable_p95_s == 30.0
    assert Estimator().durable_p95_s is None


def test_prior_alone_and_with_history():
    assert Estimator().mtti_s() == 6 * HOUR
    assert Estimator().mtti_s(uptime_s=6 * HOUR) == 12 * HOUR
    lives = [PastLife(2 * HOUR, True), PastLife(4 * HOUR, True), PastLife(HOUR, False)]
    assert Estimator(history=lives).mtti_s() == pytest.approx(13 * HOUR / 3)
    assert Estimator(history=lives, prior=Prior(2, HOUR)).mtti_s() == pytest.approx(8 * HOUR / 4)


def test_other_world_size_rescales_history_by_its_square_root():
    lives = [PastLife(HOUR, True, world_size=4)] * 9
    same, larger = Estimator(world_size=4, history=lives), Estimator(world_size=16, history=lives)
    assert same.mtti_s() == pytest.approx(15 * HOUR / 10)
    assert larger.mtti_s() == pytest.approx((6 + 4.5) * HOUR / 10)


def test_announced_share_counts_only_what_was_saved():
    assert Estimator().announced == 0
    lives = [PastLife(HOUR, True, saved=True)] * 6 + [PastLife(HOUR, True)] * 2 + [PastLife(HOUR, False)]
    assert Estimator(history=lives).announced == pytest.approx(6 / 10)


def test_auto_saves_early_then_by_the_optimum():
    auto = parse_interval("auto")
    estimator = Estimator()
    assert estimator.interval_s(auto) == FIRST_SAVE_S
    estimator.saved(blocked_s=2.0)
    assert estimator.interval_s(auto) == UNMEASURED_S
    estimator.saved(durable_s=5.0)
    assert estimator.interval_s(auto) == pytest.approx(exact(2.0, 6 * HOUR))
    assert estimator.interval_s(auto, uptime_s=18 * HOUR) == pytest.approx(exact(2.0, 24 * HOUR))


def test_auto_never_outruns_the_store_nor_the_floor():
    auto = parse_interval("auto")
    assert measured([0.001], [0.1]).interval_s(auto) == SHORTEST_S
    assert measured([0.001], [200.0]).interval_s(auto) == pytest.approx(220.0)
    assert measured([0.001], [9000.0]).interval_s(auto) == pytest.approx(9900.0)


def test_given_intervals_stand():
    estimator = measured([1.0], [30.0])
    assert estimator.interval_s(parse_interval("90s")) == 90
    assert estimator.interval_s(parse_interval("500 steps")) is None
    assert estimator.interval_s(parse_interval("lose at most 10min")) == 570
    assert measured([1.0], [500.0]).interval_s(Interval(Rule.LOSE_AT_MOST, 600)) == 300
