from __future__ import annotations

import threading

import pytest

from spot_core.signals import BaseSource, Notice, NoticeKind, Watcher
from spot_core.signals.aws import AwsSource
from spot_core.signals.gcp import GcpPreempted
from spot_core.testing.metadata import FakeAws, FakeGcp


class Scripted:
    """Says what it is told to say; anything that is an exception is raised."""

    per_node = True
    state = "scripted"

    def __init__(self, name="scripted", interval_s=0.005):
        self.name = name
        self.interval_s = interval_s
        self.says: list = []
        self.polls = 0
        self.closed = False
        self.opened_in = None
        self.polled = threading.Condition()

    def open(self):
        self.opened_in = threading.current_thread()
        return True

    def poll(self):
        with self.polled:
            self.polls += 1
            self.polled.notify_all()
        if isinstance(self.says, Exception):
            raise self.says
        return list(self.says)

    def wait_polls(self, more=2):
        with self.polled:
            goal = self.polls + more
            assert self.polled.wait_for(lambda: self.polls >= goal, 20)

    def close(self):
        self.closed = True


def preemption(identity="a", deadline=None, kind=NoticeKind.PREEMPTION):
    return Notice(identity, kind, "scripted", deadline)


@pytest.fixture
def source():
    return Scripted()


def looked(watcher, source, *says):
    """One look with the source saying this; what the listener heard."""
    source.says = list(says)
    heard: list[Notice] = []
    watcher._on_notice = heard.append
    watcher.poll_once()
    return [(n.id, n.kind.value, n.deadline) for n in heard]


def test_the_same_notice_is_told_once(source, clock):
    watcher = Watcher([source], clock=clock)
    notice = preemption(deadline=clock.now() + 120)
    assert looked(watcher, source, notice) == [("a", "preemption", notice.deadline)]
    assert looked(watcher, source, notice) == []
    assert watcher.current() == (notice,)
    assert watcher.arrived.is_set()


def test_of_one_notice_the_newest_deadline_counts_and_an_earlier_one_is_told(source, clock):
    watcher = Watcher([source], clock=clock)
    now = clock.now()
    looked(watcher, source, preemption(deadline=now + 120))
    assert looked(watcher, source, preemption(deadline=now + 39)) == [("a", "preemption", now + 39)]
    assert watcher.deadline() == now + 39
    # A service that computes "now + 2 minutes" at every request slides; that is no news.
    assert looked(watcher, source, preemption(deadline=now + 41)) == []
    assert watcher.deadline() == now + 41


def test_of_several_notices_the_earliest_deadline_counts(clock):
    one, other = Scripted("one"), Scripted("other")
    watcher = Watcher([one, other], clock=clock)
    one.says = [preemption("a", clock.now() + 120), preemption("advice", None, NoticeKind.ADVISORY)]
    other.says = [preemption("b", clock.now() + 30, NoticeKind.MAINTENANCE)]
    watcher.poll_once()
    assert watcher.deadline() == clock.now() + 30
    assert [n.id for n in watcher.current()] == ["b", "a", "advice"]


def test_advice_arrives_but_sets_no_deadline(source, clock):
    watcher = Watcher([source], clock=clock)
    assert looked(watcher, source, preemption(kind=NoticeKind.ADVISORY)) == [("a", "advisory", None)]
    assert watcher.arrived.is_set()
    assert watcher.deadline() is None


def test_a_cancelled_notice_is_told_once_and_forgotten(source, clock):
    watcher = Watcher([source], clock=clock)
    first, second = preemption("a", clock.now() + 30), preemption("b", clock.now() + 90)
    looked(watcher, source, first, second)
    assert looked(watcher, source, first.cancelled("gone"), second) == [("a", "cancelled", None)]
    assert watcher.deadline() == second.deadline
    assert watcher.arrived.is_set()
    assert looked(watcher, source, first.cancelled("gone"), second.cancelled("gone")) == [("b", "cancelled", None)]
    assert not watcher.arrived.is_set()
    assert watcher.current() == ()
    # Announced again, it is news again.
    assert len(looked(watcher, source, first)) == 1


def test_cancelling_what_was_never_announced_is_nothing(source, clock):
    watcher = Watcher([source], clock=clock)
    assert looked(watcher, source, preemption().cancelled("gone")) == []


def test_with_a_horizon_a_far_deadline_is_held_until_it_is_near(source, clock):
    watcher = Watcher([source], clock=clock, horizon_s=180)
    far = preemption("m", clock.now() + 5 * 86400, NoticeKind.MAINTENANCE)
    assert looked(watcher, source, far) == []
    assert not watcher.arrived.is_set()
    assert (watcher.held(), watcher.deadline()) == ((far,), None)
    clock.advance(5 * 86400 - 181)
    assert looked(watcher, source, far) == []
    clock.advance(1)
    assert looked(watcher, source) == [("m", "maintenance", far.deadline)]
    assert watcher.held() == ()


def test_a_held_notice_that_is_cancelled_is_never_told(source, clock):
    watcher = Watcher([source], clock=clock, horizon_s=180)
    far = preemption("m", clock.now() + 1000, NoticeKind.MAINTENANCE)
    looked(watcher, source, far)
    assert looked(watcher, source, far.cancelled("gone")) == []
    assert watcher.held() == ()


def test_a_source_that_raises_goes_on(source, caplog):
    source.interval_s = 0.005
    watcher = Watcher([source])
    watcher._stopping.wait = lambda pause_s, wait=watcher._stopping.wait: wait(min(pause_s, 0.005))
    with watcher:
        source.says = RuntimeError("third party")
        source.wait_polls(3)
        source.says = [preemption()]
        assert watcher.arrived.wait(20)
    assert "broke its contract by raising" in caplog.text


def test_a_listener_that_raises_ends_nothing(source, caplog):
    heard = []

    def listener(notice):
        heard.append(notice.id)
        raise RuntimeError("listener")

    with Watcher([source], on_notice=listener) as watcher:
        source.says = [preemption("a")]
        assert watcher.arrived.wait(20)
        source.says = [preemption("a"), preemption("b")]
        source.wait_polls(3)
    assert heard == ["a", "b"]


def test_sources_are_opened_in_the_starting_thread_and_polled_in_their_own(caplog):
    blocked, quick = Scripted("blocked"), Scripted("quick")
    release = threading.Event()
    polled_in = []

    def wait_long():
        polled_in.append(threading.current_thread().name)
        release.wait(20)
        return []

    blocked.poll = wait_long
    with caplog.at_level("INFO"), Watcher([blocked, quick]) as watcher:
        # A source that blocks (a slow first call, a long poll) holds up nobody else.
        quick.says = [preemption()]
        assert watcher.arrived.wait(20)
        release.set()
    assert blocked.opened_in is threading.current_thread()
    assert polled_in[0] == "spot-notice-blocked"
    assert "notice sources: blocked (scripted); quick (scripted)" in caplog.messages
    assert blocked.closed
    assert quick.closed


def test_a_source_that_cannot_work_here_is_not_polled_but_named(source):
    source.open = lambda: False
    with Watcher([source]) as watcher:
        assert watcher.states() == ["scripted (scripted)"]
    assert source.polls == 0


def test_acknowledging_reaches_those_that_can():
    class Acking(Scripted):
        acked = 0

        def ack(self):
            self.acked += 1

    one = Acking()
    Watcher([one, Scripted()]).acknowledge()
    assert one.acked == 1


def test_closing_does_not_wait_for_a_long_poll():
    with FakeGcp() as gcp:
        source = GcpPreempted(gcp.url, wait_s=60)
        watcher = Watcher([source])
        watcher.start()
        assert gcp.wait_for_requests(2)
        closer = threading.Thread(target=watcher.close)
        closer.start()
        closer.join(20)
        assert not closer.is_alive()


def test_end_to_end_with_a_metadata_service_that_fails_first():
    heard = []
    with FakeAws() as aws:
        aws.fail(503, times=2)
        source = AwsSource(aws.url, every_s=0.01)
        source.backoff_cap_s = 0.02
        with Watcher([source], on_notice=heard.append) as watcher:
            assert aws.wait_for_requests(6)
            aws.interrupt("terminate", 4_000_000_000)
            assert watcher.arrived.wait(20)
            assert watcher.deadline() == 4_000_000_000
    assert [n.id for n in heard] == ["aws:spot-interruption"]


def test_a_bug_in_a_source_is_logged_once_and_waited_out(caplog):
    class Buggy(BaseSource):
        name = "buggy"
        every_s = 0.0

        def look(self):
            yield preemption()
            raise AttributeError("bug")

    source = Buggy()
    for _ in range(3):
        assert [n.id for n in source.poll()] == ["a"]
    assert source.interval_s == 4.0
    assert source.state == "failing (3 in a row): bug"
    assert sum("has a fault" in message for message in caplog.messages) == 1
