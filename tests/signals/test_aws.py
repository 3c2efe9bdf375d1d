from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from spot_core.signals import NoticeKind
from spot_core.signals.aws import AwsSource
from spot_core.testing.metadata import FakeAws


@pytest.fixture
def aws(clock) -> Iterator[FakeAws]:
    with FakeAws(clock=clock) as server:
        yield server


@pytest.fixture
def source(aws, clock) -> Iterator[AwsSource]:
    source = AwsSource(aws.url, clock=clock, timeout_s=0.3)
    yield source
    source.close()


@pytest.mark.parametrize("action", ["terminate", "stop"])
def test_interruption_names_its_time(aws, source, clock, action):
    aws.interrupt(action, clock.now() + 120)
    (notice,) = source.poll()
    assert (notice.id, notice.kind, notice.source) == ("aws:spot-interruption", NoticeKind.PREEMPTION, "aws")
    assert notice.deadline == clock.now() + 120
    assert notice.detail == f"spot {action}"


def test_the_mark_appears_at_a_set_time(aws, source, clock):
    aws.interrupt("terminate", clock.now() + 220, since=clock.now() + 100)
    assert source.poll() == []
    clock.advance(99)
    assert source.poll() == []
    clock.advance(1)
    assert [notice.deadline for notice in source.poll()] == [clock.now() + 120]


def test_hibernation_has_no_lead(aws, source, clock):
    aws.interrupt("hibernate", clock.now() + 120)
    began = clock.now()
    assert [notice.deadline for notice in source.poll()] == [began]
    clock.advance(5)
    assert [notice.deadline for notice in source.poll()] == [began]


def test_only_the_legacy_path_is_there(aws, source, clock):
    aws.interrupt("terminate", clock.now() + 120)
    aws.hide(aws.INSTANCE_ACTION)
    (notice,) = source.poll()
    assert (notice.id, notice.deadline) == ("aws:spot-interruption", clock.now() + 120)


def test_a_legacy_value_that_is_no_time_is_nothing(aws, source):
    aws.show(aws.TERMINATION_TIME, "marked for termination soon")
    assert source.poll() == []
    assert "failing" not in source.state


@pytest.mark.parametrize("path", ["INSTANCE_ACTION", "TERMINATION_TIME"])
def test_a_time_long_past_was_not_acted_on(aws, source, clock, path):
    aws.interrupt("terminate", clock.now() - 121)
    for other in {"INSTANCE_ACTION", "TERMINATION_TIME"} - {path}:
        aws.hide(getattr(aws, other))
    assert source.poll() == []
    aws.interrupt("terminate", clock.now() - 30)
    assert len(source.poll()) == 1


def test_an_unknown_action_still_interrupts(aws, source, clock):
    aws.interrupt("dematerialize", clock.now() + 120)
    assert [notice.kind for notice in source.poll()] == [NoticeKind.PREEMPTION]


def test_rebalance_is_advice(aws, source, clock):
    aws.recommend_rebalance(clock.now())
    (notice,) = source.poll()
    assert (notice.kind, notice.deadline, notice.stops) == (NoticeKind.ADVISORY, None, False)
    aws.interrupt("terminate", clock.now() + 120)
    assert {n.kind for n in source.poll()} == {NoticeKind.ADVISORY, NoticeKind.PREEMPTION}


def test_maintenance_with_and_without_a_stop(aws, source, clock):
    aws.schedule("instance-retirement", clock.now() + 5 * 86400, event_id="instance-event-7")
    (notice,) = source.poll()
    assert (notice.id, notice.kind) == ("aws:instance-event-7", NoticeKind.MAINTENANCE)
    assert notice.deadline == clock.now() + 5 * 86400
    clock.advance(61)
    aws.schedule("system-maintenance", clock.now() + 86400, event_id="instance-event-8")
    assert [n.kind for n in source.poll()] == [NoticeKind.ADVISORY]


@pytest.mark.parametrize("state", ["canceled", "completed"])
def test_maintenance_that_is_over_is_taken_back(aws, source, clock, state):
    aws.schedule("instance-stop", clock.now() + 3600)
    assert [n.kind for n in source.poll()] == [NoticeKind.MAINTENANCE]
    clock.advance(61)
    aws.schedule("instance-stop", clock.now() + 3600, state=state)
    (notice,) = source.poll()
    assert (notice.id, notice.kind) == ("aws:instance-event-0001", NoticeKind.CANCELLED)


def test_maintenance_of_an_unknown_code_or_an_absent_list_is_nothing(aws, source, clock):
    aws.schedule("flux-recalibration", clock.now() + 60)
    assert source.poll() == []
    clock.advance(61)
    aws.hide(aws.SCHEDULED)
    assert source.poll() == []
    assert "failing" not in source.state


def test_maintenance_is_asked_for_once_a_minute(aws, source, clock):
    for _ in range(12):
        source.poll()
        clock.advance(5)
    assert aws.paths().count(aws.SCHEDULED) == 1
    assert aws.paths().count(aws.INSTANCE_ACTION) == 12


def test_one_token_and_one_connection_serve_many_polls(aws, source, clock):
    for _ in range(20):
        source.poll()
        clock.advance(5)
    assert len(aws.paths("PUT")) == 1
    assert aws.connections == 1
    assert aws.requests[0].headers["x-aws-ec2-metadata-token-ttl-seconds"] == "3600"


def test_the_token_is_renewed_before_it_ends(aws, clock):
    source = AwsSource(aws.url, clock=clock, token_ttl_s=60)
    source.poll()
    clock.advance(44)
    source.poll()
    assert len(aws.paths("PUT")) == 1
    clock.advance(2)
    source.poll()
    assert len(aws.paths("PUT")) == 2
    assert "failing" not in source.state
    source.close()


def test_a_refused_token_is_dropped_and_the_request_repeated(aws, source, clock):
    source.poll()
    aws.revoke()
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1
    assert len(aws.paths("PUT")) == 2
    assert "failing" not in source.state


def test_401_for_a_minute_does_not_end_the_watching(aws, source, clock, caplog):
    source.poll()
    aws.fail(401, times=10**6, method="GET")
    with caplog.at_level(logging.WARNING):
        for _ in range(12):
            assert source.poll() == []
            clock.advance(5)
    assert "answered 401" in source.state
    # It says so, but not at every poll.
    assert len(caplog.records) == 2
    aws.heal()
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1


def test_behind_a_hop_limit_it_goes_on_without_a_token(aws, source, clock):
    aws.token_required = False
    aws.hang(method="PUT")
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1
    assert "without a token" in source.state
    assert "x-aws-ec2-metadata-token" not in aws.requests[-1].headers
    for _ in range(3):
        clock.advance(5)
        source.poll()
    # The PUT that gets no answer is not paid for at every poll.
    assert len(aws.paths("PUT")) == 1
    aws.heal()
    clock.advance(300)
    source.poll()
    assert "with a token" in source.state


def test_behind_a_hop_limit_where_tokens_are_required_it_says_what_to_change(aws, source):
    aws.hang(method="PUT")
    assert source.poll() == []
    assert "failing" in source.state
    assert "HttpPutResponseHopLimit" in source.state


def test_tokens_that_become_required_are_asked_for_in_the_same_poll(aws, source, clock):
    aws.token_required = False
    aws.fail(403, method="PUT")
    source.poll()
    assert "without a token" in source.state
    aws.token_required = True
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1
    assert "with a token" in source.state


@pytest.mark.parametrize("status", [403, 404, 405])
def test_a_service_without_tokens_is_version_1(aws, source, clock, status):
    aws.token_required = False
    aws.fail(status, method="PUT")
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1


@pytest.mark.parametrize("status", [429, 500, 503])
def test_a_burst_of_errors_lengthens_the_wait_and_passes(aws, source, clock, status):
    aws.fail(status, times=6)
    waits = []
    for _ in range(3):
        assert source.poll() == []
        waits.append(source.interval_s)
    assert waits == [5.0, 8.0, 8.0]
    aws.heal()
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1
    assert source.interval_s == 5.0


@pytest.mark.parametrize("body", ["<html>sign in</html>", '{"action": "term', "[]", '{"action":"stop","time":"soon"}'])
def test_a_body_that_is_not_one_is_no_notice(aws, source, body):
    aws.show(aws.INSTANCE_ACTION, body)
    assert source.poll() == []
    assert "failing" in source.state


def test_a_fault_in_a_later_path_keeps_the_notice_of_an_earlier_one(aws, source, clock):
    aws.interrupt("terminate", clock.now() + 120)
    aws.garble("not json", path="maintenance")
    assert [n.id for n in source.poll()] == ["aws:spot-interruption"]
    assert "not JSON" in source.state


def test_a_connection_reset_costs_one_poll(aws, source, clock):
    source.poll()
    aws.reset(path="instance-action")
    assert source.poll() == []
    assert "failing (1 in a row)" in source.state
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1


def test_no_proxy_from_the_environment_is_asked(aws, clock, monkeypatch):
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    source = AwsSource(aws.url, clock=clock)
    aws.interrupt("terminate", clock.now() + 120)
    assert len(source.poll()) == 1
    source.close()
