"""The save interval: what may be written, and the optimum against published numbers and against the model itself."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_core.errors import ConfigError
from spot_core.interval import Interval, Rule, daly, exact, overhead, parse_interval, waste, young


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("auto", Interval(Rule.AUTO)),
        (" AUTO ", Interval(Rule.AUTO)),
        ("90s", Interval(Rule.SECONDS, 90)),
        ("90 seconds", Interval(Rule.SECONDS, 90)),
        ("10min", Interval(Rule.SECONDS, 600)),
        ("10 mins", Interval(Rule.SECONDS, 600)),
        ("5m", Interval(Rule.SECONDS, 300)),
        ("1.5h", Interval(Rule.SECONDS, 5400)),
        ("2 hours", Interval(Rule.SECONDS, 7200)),
        ("500 steps", Interval(Rule.STEPS, 500)),
        ("1 step", Interval(Rule.STEPS, 1)),
        ("lose at most 10min", Interval(Rule.LOSE_AT_MOST, 600)),
        ("Lose at most  2 h", Interval(Rule.LOSE_AT_MOST, 7200)),
    ],
)
def test_accepted(text, expected):
    assert parse_interval(text) == expected
    assert parse_interval(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "0s", "-5s", "0 steps", "-1 steps", "1.5 steps", "10", "10 parsecs", "s", "now", "lose at most 5 steps",
     "lose at most", "10min 5s", "1e3s", "nan s", 90, None],
)  # fmt: skip
def test_refused_with_the_list_of_what_is_accepted(text):
    with pytest.raises(ConfigError) as caught:
        parse_interval(text)
    for accepted in ("auto", "90s", "10min", "500 steps", "lose at most 10min"):
        assert accepted in str(caught.value)


@pytest.mark.parametrize(
    ("cost", "mtti", "expected", "overheads"),
    [
        (30, 86400, (2276.8, 2256.9, 2256.9), (0.0283, 0.0282, 0.0282)),
        (60, 7200, (929.5, 889.9, 890.0), (0.1604, 0.1602, 0.1602)),
        (300, 3600, (1469.7, 1276.5, 1276.9), (0.608, 0.602, 0.602)),
        (600, 1800, (1469.7, 1096.9, 1100.0), (1.82, 1.75, 1.75)),
        (1800, 1800, (2545.6, 1487.0, 1514.5), (6.70, 5.74, 5.74)),
    ],
)
def test_the_three_forms(cost, mtti, expected, overheads):
    for form, tau, over in zip((young, daly, exact), expected, overheads, strict=True):
        assert form(cost, mtti) == pytest.approx(tau, abs=0.06)
        assert overhead(tau, cost, mtti, restart_s=120) == pytest.approx(over, rel=4e-3)


def test_published_worked_example():
    """64 nodes, each failing once in 40 h; a save of 60 s or 8 s; a restart of 300 s or 120 s."""
    mtti = 40 * 3600 / 64
    slow, fast = young(60, mtti), young(8, mtti)
    assert slow == pytest.approx(520, abs=1)
    assert fast == pytest.approx(190, abs=1)
    wastes = [waste(slow, 60, mtti, 300), waste(fast, 8, mtti, 300), waste(fast, 8, mtti, 120)]
    assert [round(100 * w) for w in wastes] == [36, 22, 14]


costs = st.floats(min_value=1e-4, max_value=1e4)
mttis = st.floats(min_value=10, max_value=1e7)


@given(costs, mttis)
def test_exact_is_the_minimum_of_the_model(cost, mtti):
    tau = exact(cost, mtti)
    assert 0 < tau <= mtti
    best = overhead(tau, cost, mtti)
    if math.isfinite(best):
        for factor in (0.8, 0.97, 1.03, 1.25):
            assert overhead(tau * factor, cost, mtti) >= best * (1 - 1e-9) - 1e-9


@given(costs, mttis)
def test_forms_agree_while_saves_are_cheap(cost, mtti):
    if cost < mtti / 10:
        assert daly(cost, mtti) == pytest.approx(exact(cost, mtti), rel=1e-3)
    assert exact(cost, mtti) <= young(cost, mtti) * (1 + 1e-9)


@given(costs, mttis, st.floats(min_value=0, max_value=0.99))
def test_announced_losses_stretch_the_interval_like_a_longer_mtti(cost, mtti, announced):
    for form in (young, daly, exact):
        assert form(cost, mtti, announced) == pytest.approx(form(cost, mtti / (1 - announced)))
        assert form(cost, mtti, announced) >= form(cost, mtti) * (1 - 1e-9)


@pytest.mark.parametrize("bad", [(0, 1, 0), (1, 0, 0), (-1, 1, 0), (1, 1, 1.0), (1, 1, -0.1)])
def test_no_optimum_for_nonsense(bad):
    with pytest.raises(ValueError, match="above zero"):
        exact(*bad)


def test_extremes_end():
    assert exact(1e6, 1.0) == pytest.approx(1.0)
    assert exact(1e-9, 1e9) == pytest.approx(young(1e-9, 1e9), rel=1e-3)


def test_multiples_of_a_count_are_noticed_also_when_steps_are_skipped():
    every = parse_interval("5 steps")
    assert [every.passes(None, step) for step in (4, 5, 6)] == [False, True, False]
    assert [every.passes(before, step) for before, step in ((4, 5), (5, 6), (4, 6), (9, 10), (8, 16))] == [
        True, False, True, True, True
    ]  # fmt: skip
