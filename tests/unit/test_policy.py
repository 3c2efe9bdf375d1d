"""The decision table. Every case says what is known at a boundary and what has to come out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spot_core.policy import CONTINUE, EXIT_S, Kind, Saves, Standing, Timing, decide, remember, stop_at, usable_until
from spot_core.signals.notice import Notice, NoticeKind

NOW = 1_000_000.0
QUIET = Saves(interval_s=600, since_s=10)
FAST = Timing(staged_s=0.2, durable_s=4.0)  # allow 5 s for a save


def told(kind=NoticeKind.PREEMPTION, deadline=NOW + 30, received=NOW, id="n"):
    return Standing(Notice(id, kind, "aws", deadline), received)


def test_nothing_to_do():
    assert decide(7, NOW, QUIET, [], FAST) == CONTINUE


@pytest.mark.parametrize(
    ("saves", "kind"),
    [
        (Saves(600, since_s=599.9), Kind.CONTINUE),
        (Saves(600, since_s=600), Kind.SAVE),
        (Saves(600, since_s=601, in_flight_s=600.5), Kind.CONTINUE),
        (Saves(600, since_s=601, last_step=7), Kind.CONTINUE),
        (Saves(None, since_s=1e9), Kind.CONTINUE),
        (Saves(None, since_s=0, step_due=True), Kind.SAVE),
        (Saves(None, since_s=0, step_due=True, in_flight_s=1), Kind.SAVE),
        (Saves(None, since_s=0, step_due=True, last_step=7), Kind.CONTINUE),
    ],
)
def test_interval(saves, kind):
    assert decide(7, NOW, saves, [], FAST).kind is kind


def test_a_save_that_outlasts_the_interval_is_named_as_the_reason():
    late = Saves(600, since_s=601, in_flight_s=600.5)
    assert "still in flight after 600.5 s" in decide(7, NOW, late, [], FAST).reason


@pytest.mark.parametrize(
    ("age", "saves", "timing", "kind"),
    [
        (0, QUIET, FAST, Kind.STOP_SAVE),
        (0, QUIET, Timing(), Kind.STOP_SAVE),  # nothing measured: 10 s assumed, 25 s usable
        (20, QUIET, FAST, Kind.STOP_SAVE),  # 5 s usable, 5 s needed
        (20.1, QUIET, FAST, Kind.STOP_NOW),
        (0, QUIET, Timing(1, 21), Kind.STOP_NOW),  # 26.25 s needed
        (0, Saves(600, 10, in_flight_s=2), FAST, Kind.STOP_SAVE),  # 3 s pending + 5 s
        (18, Saves(600, 10, in_flight_s=2), FAST, Kind.DRAIN),
        (0, Saves(600, 10, in_flight_s=2, last_step=7), FAST, Kind.DRAIN),
        (0, Saves(600, 10, last_step=7), FAST, Kind.STOP_NOW),
        (40, QUIET, FAST, Kind.STOP_NOW),
        (40, Saves(600, 10, in_flight_s=2), FAST, Kind.STOP_NOW),
    ],
)
def test_preemption_in_a_window_of_25_s(age, saves, timing, kind):
    decision = decide(7, NOW + age, saves, [told()], timing)
    assert decision.kind is kind
    assert decision.deadline == NOW + 25
    assert "aws" in decision.reason


def test_window_is_a_setting_and_no_deadline_means_the_window():
    assert decide(7, NOW, QUIET, [told(deadline=None)], FAST, window_s=4).kind is Kind.STOP_NOW
    assert decide(7, NOW, QUIET, [told(deadline=None)], FAST, window_s=6).kind is Kind.STOP_SAVE


def test_the_earliest_stopping_notice_counts():
    notices = [told(id="a"), told(id="b", deadline=NOW + 4)]
    decision = decide(7, NOW, QUIET, notices, FAST)
    assert (decision.kind, decision.deadline) == (Kind.STOP_NOW, NOW + 4 - EXIT_S)


@pytest.mark.parametrize("kind", [NoticeKind.MAINTENANCE, NoticeKind.TIME_LIMIT])
def test_a_far_deadline_is_used_up_to_twice_the_window(kind):
    far = told(kind, deadline=NOW + 900)
    seen = Saves(600, 10, notified=frozenset({"n"}))
    assert decide(7, NOW + 849, seen, [far], FAST) == CONTINUE
    assert decide(7, NOW + 850, seen, [far], FAST).kind is Kind.STOP_SAVE
    slow = Timing(1, 80)  # 100 s for a save
    assert decide(7, NOW + 699, seen, [far], slow) == CONTINUE
    assert decide(7, NOW + 700, seen, [far], slow).kind is Kind.STOP_SAVE


@pytest.mark.parametrize(
    ("kind", "first"),
    [(NoticeKind.ADVISORY, Kind.SAVE), (NoticeKind.MAINTENANCE, Kind.SAVE), (NoticeKind.TIME_LIMIT, Kind.CONTINUE)],
)
def test_one_early_save_then_on(kind, first):
    notice = told(kind, deadline=NOW + 900)
    assert decide(7, NOW, QUIET, [notice], FAST).kind is first
    assert decide(7, NOW, Saves(600, 10, notified=frozenset({"n"})), [notice], FAST) == CONTINUE
    assert decide(7, NOW, Saves(600, 10, in_flight_s=1), [notice], FAST) == CONTINUE
    assert decide(7, NOW, Saves(600, 10, last_step=7), [notice], FAST) == CONTINUE


def test_cancelled_is_forgotten_and_repeats_keep_the_first_reception():
    first = told().notice
    standing = remember((), first, NOW)
    standing = remember(standing, first, NOW + 9)
    assert standing == (Standing(first, NOW),)
    assert remember(standing, first.cancelled("gone"), NOW + 10) == ()
    assert decide(7, NOW + 10, QUIET, remember(standing, first.cancelled("gone"), NOW + 10), FAST) == CONTINUE


times = st.floats(min_value=0, max_value=300)


@given(
    age=times,
    durable=st.none() | st.floats(min_value=0.01, max_value=100),
    in_flight=st.none() | times,
    lead=st.none() | times,
    kind=st.sampled_from([k for k in NoticeKind if k is not NoticeKind.CANCELLED]),
    window=st.floats(min_value=1, max_value=120),
)
def test_no_emergency_save_is_started_that_cannot_finish(age, durable, in_flight, lead, kind, window):
    timing = Timing(None, durable)
    standing = told(kind, None if lead is None else NOW + lead)
    now = NOW + age
    decision = decide(7, now, Saves(600, 10, in_flight_s=in_flight), [standing], timing, window_s=window)
    if decision.kind.stops:
        assert standing.notice.stops
        assert now >= stop_at(standing, timing, window)
    elif standing.notice.stops:
        assert now < stop_at(standing, timing, window)
    if decision.kind is Kind.STOP_SAVE:
        assert now + timing.save_s <= usable_until(standing, window) + 1e-6
        if durable is not None:
            assert timing.save_s >= durable + 1
    if decision.kind is Kind.DRAIN:
        assert in_flight is not None
    if decision.kind is Kind.SAVE:
        assert in_flight is None
