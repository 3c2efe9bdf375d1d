from __future__ import annotations

import json
import threading
from collections.abc import Iterator

import pytest

from spot_core.signals import NoticeKind, SupportsAck
from spot_core.signals.azure_events import AzureSource
from spot_core.testing.metadata import FakeAzure


@pytest.fixture
def azure() -> Iterator[FakeAzure]:
    with FakeAzure() as server:
        yield server


@pytest.fixture
def source(azure, clock) -> Iterator[AzureSource]:
    source = AzureSource(azure.url, clock=clock, timeout_s=0.5, acknowledge=True)
    yield source
    source.close()


@pytest.mark.parametrize(
    ("event_type", "kind"),
    [
        ("Preempt", NoticeKind.PREEMPTION),
        ("Terminate", NoticeKind.PREEMPTION),
        ("Reboot", NoticeKind.MAINTENANCE),
        ("Redeploy", NoticeKind.MAINTENANCE),
        ("Freeze", NoticeKind.ADVISORY),
    ],
)
def test_every_type_of_event(azure, source, clock, event_type, kind):
    azure.schedule("A1", event_type, clock.now() + 600)
    (notice,) = source.poll()
    assert (notice.id, notice.kind) == ("azure:A1", kind)
    assert notice.deadline == (None if kind is NoticeKind.ADVISORY else clock.now() + 600)


def test_the_first_call_may_be_slow_and_blocks_only_its_own_thread(clock):
    with FakeAzure(slow_first_call=True) as azure:
        azure.schedule("A1", "Preempt", clock.now() + 30)
        # The usual time-out would have given up.
        source = AzureSource(azure.url, clock=clock, timeout_s=0.2, first_call_s=20)
        found = []
        poller = threading.Thread(target=lambda: found.extend(source.poll()))
        poller.start()
        assert azure.wait_for_requests(2)
        poller.join(0.5)
        assert poller.is_alive()
        assert "two minutes" in source.state
        azure.finish_first_call()
        poller.join(10)
        assert [notice.id for notice in found] == ["azure:A1"]
        assert source.state == "events for trainer-0, every 1 s"
        source.close()


def test_events_of_other_machines_are_not_ours(azure, source, clock):
    azure.schedule("A1", "Preempt", clock.now() + 30, resources=["trainer-1", "trainer-2"])
    assert source.poll() == []
    azure.schedule("A2", "Reboot", clock.now() + 900, resources=["trainer-1", "TRAINER-0"])
    assert [notice.id for notice in source.poll()] == ["azure:A2"]


def test_an_event_that_has_started_is_happening_now(azure, source, clock):
    azure.schedule("A1", "Preempt", clock.now() + 30)
    assert source.poll()[0].deadline == clock.now() + 30
    azure.start("A1")
    clock.advance(3)
    began = clock.now()
    assert [(n.id, n.deadline) for n in source.poll()] == [("azure:A1", began)]
    clock.advance(2)
    assert source.poll()[0].deadline == began


def test_an_event_may_be_first_seen_started(azure, source, clock):
    azure.schedule("A1", "Reboot", clock.now() + 900)
    azure.start("A1")
    (notice,) = source.poll()
    assert (notice.kind, notice.deadline) == (NoticeKind.MAINTENANCE, clock.now())


def test_an_event_that_vanishes_is_taken_back(azure, source, clock):
    azure.schedule("A1", "Redeploy", clock.now() + 600)
    azure.schedule("A2", "Preempt", clock.now() + 30)
    assert len(source.poll()) == 2
    azure.remove("A1")
    assert [(n.id, n.kind) for n in source.poll()] == [
        ("azure:A1", NoticeKind.CANCELLED),
        ("azure:A2", NoticeKind.PREEMPTION),
    ]
    assert [n.id for n in source.poll()] == ["azure:A2"]


def test_an_unchanged_incarnation_is_not_read_again(azure, source, clock):
    azure.schedule("A1", "Preempt", clock.now() + 30)
    before = source.poll()
    document = {"DocumentIncarnation": 2, "Events": []}
    azure.garble(json.dumps(document), path="scheduledevents")
    assert source.poll() == before


def test_an_event_of_an_unknown_type_is_nothing(azure, source, clock):
    azure.schedule("A1", "Sublimate", clock.now() + 30)
    assert source.poll() == []
    assert "failing" not in source.state


def test_acknowledging_names_the_scheduled_events_of_this_machine_once(azure, source, clock):
    assert isinstance(source, SupportsAck)
    azure.schedule("A1", "Redeploy", clock.now() + 600)
    azure.schedule("A2", "Redeploy", clock.now() + 600, resources=["trainer-9"])
    source.poll()
    assert azure.acknowledged == []
    source.ack()
    source.ack()
    assert azure.acknowledged == ["A1"]
    assert [(n.id, n.deadline) for n in source.poll()] == [("azure:A1", clock.now())]


def test_acknowledging_is_opt_in(azure, clock):
    source = AzureSource(azure.url, clock=clock)
    azure.schedule("A1", "Redeploy", clock.now() + 600)
    source.poll()
    source.ack()
    assert azure.paths("POST") == []
    source.close()


def test_an_acknowledgement_that_fails_is_only_a_warning(azure, source, clock, caplog):
    azure.schedule("A1", "Redeploy", clock.now() + 600)
    source.poll()
    azure.fail(500, method="POST")
    source.ack()
    assert "not acknowledged" in caplog.text
    source.ack()
    assert azure.acknowledged == ["A1"]


@pytest.mark.parametrize(
    "body",
    [
        "",
        "<html></html>",
        "[]",
        '{"Events": {}}',
        '{"Events": ["x"]}',
        '{"Events":[{"EventType":"Preempt","Resources":["trainer-0"]}]}',
    ],
)
def test_a_document_that_is_not_one_keeps_what_was_known(azure, source, clock, body):
    azure.schedule("A1", "Preempt", clock.now() + 30)
    source.poll()
    azure.garble(body, path="scheduledevents")
    assert source.poll() == []
    assert "failing" in source.state
    assert [n.id for n in source.poll()] == ["azure:A1"]


def test_the_name_of_the_machine_is_asked_for_until_it_is_known(azure, source, clock):
    azure.schedule("A1", "Preempt", clock.now() + 30)
    azure.fail(503, path="compute/name")
    assert source.poll() == []
    assert len(source.poll()) == 1
    assert azure.requests[0].headers["metadata"] == "true"
