from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from spot_core.signals import NoticeKind
from spot_core.signals.gcp import GcpMaintenance, GcpPreempted
from spot_core.testing.metadata import FakeGcp


@pytest.fixture
def gcp() -> Iterator[FakeGcp]:
    with FakeGcp() as server:
        yield server


@pytest.fixture
def preempted(gcp, clock) -> Iterator[GcpPreempted]:
    source = GcpPreempted(gcp.url, clock=clock, wait_s=20)
    yield source
    source.close()


@pytest.fixture
def maintenance(gcp, clock) -> Iterator[GcpMaintenance]:
    source = GcpMaintenance(gcp.url, clock=clock, wait_s=20)
    yield source
    source.close()


def test_a_preemption_from_before_the_first_request_is_seen_at_once(gcp, preempted, clock):
    gcp.preempt()
    (notice,) = preempted.poll()
    assert (notice.id, notice.kind, notice.deadline) == ("gcp:preempted", NoticeKind.PREEMPTION, clock.now() + 30)
    assert gcp.requests[0].query == {}


def test_later_requests_wait_for_a_change_from_the_last_etag(gcp, preempted, clock):
    assert preempted.poll() == []
    found = []
    poller = threading.Thread(target=lambda: found.extend(preempted.poll()))
    poller.start()
    assert gcp.wait_for_requests(2)
    assert set(gcp.requests[1].query) == {"wait_for_change", "last_etag", "timeout_sec"}
    assert poller.is_alive()
    gcp.preempt()
    poller.join(10)
    assert [notice.id for notice in found] == ["gcp:preempted"]
    assert preempted.interval_s == 0


def test_a_change_between_two_requests_is_not_lost(gcp, preempted):
    preempted.poll()
    gcp.preempt()
    assert [notice.id for notice in preempted.poll()] == ["gcp:preempted"]


def test_the_deadline_counts_from_the_first_sight(gcp, preempted, clock):
    gcp.preempt()
    first = preempted.poll()[0].deadline
    gcp.waits = False
    clock.advance(10)
    assert preempted.poll()[0].deadline == first


def test_a_wait_that_times_out_is_no_failure(gcp, clock):
    source = GcpPreempted(gcp.url, clock=clock, wait_s=0.05)
    source.poll()
    assert source.poll() == []
    assert "failing" not in source.state
    source.close()


def test_a_server_that_does_not_wait_is_not_asked_in_a_hot_loop(gcp, preempted):
    gcp.waits = False
    preempted.poll()
    preempted.poll()
    assert preempted.interval_s == 1.0
    gcp.preempt()
    assert len(preempted.poll()) == 1


def test_the_flavor_header_is_sent_and_looked_for(gcp, preempted):
    preempted.poll()
    assert gcp.requests[0].headers["metadata-flavor"] == "Google"
    gcp.flavor = False
    gcp.preempt()
    assert preempted.poll() == []
    assert "not Google's metadata server" in preempted.state
    gcp.flavor = True
    assert len(preempted.poll()) == 1


@pytest.mark.parametrize("body", ["<html>captive portal</html>", ""])
def test_a_value_that_is_neither_is_a_failure(gcp, preempted, body):
    gcp.set(gcp.PREEMPTED, body)
    assert preempted.poll() == []
    assert "neither TRUE nor FALSE" in preempted.state


@pytest.mark.parametrize("order", ["fail", "reset"])
def test_a_fault_in_mid_poll_keeps_the_etag(gcp, preempted, order):
    preempted.poll()
    gcp.fail(503) if order == "fail" else gcp.reset()
    assert preempted.poll() == []
    assert preempted.interval_s == 1.0
    gcp.preempt()
    assert len(preempted.poll()) == 1
    assert gcp.requests[-1].query["last_etag"] == gcp.requests[1].query["last_etag"]


def test_maintenance_that_terminates_stops_and_one_that_migrates_advises(gcp, maintenance, clock):
    assert maintenance.poll() == []
    gcp.maintenance("MIGRATE_ON_HOST_MAINTENANCE")
    (advice,) = maintenance.poll()
    assert (advice.kind, advice.deadline) == (NoticeKind.ADVISORY, None)
    gcp.maintenance("TERMINATE_ON_HOST_MAINTENANCE")
    taken_back, notice = maintenance.poll()
    assert (taken_back.id, taken_back.kind) == (advice.id, NoticeKind.CANCELLED)
    assert (notice.kind, notice.deadline) == (NoticeKind.MAINTENANCE, clock.now() + 60)
    gcp.maintenance("NONE")
    assert [(n.id, n.kind) for n in maintenance.poll()] == [(notice.id, NoticeKind.CANCELLED)]


def test_a_second_maintenance_gets_a_deadline_of_its_own(gcp, maintenance, clock):
    gcp.maintenance("TERMINATE_ON_HOST_MAINTENANCE")
    first = maintenance.poll()[0].deadline
    gcp.maintenance("NONE")
    maintenance.poll()
    clock.advance(1000)
    gcp.maintenance("TERMINATE_ON_HOST_MAINTENANCE")
    assert maintenance.poll()[0].deadline == first + 1000


def test_an_unknown_maintenance_event_is_nothing(gcp, maintenance):
    gcp.maintenance("REALIGN_THE_RACKS")
    assert maintenance.poll() == []
    assert "failing" not in maintenance.state
