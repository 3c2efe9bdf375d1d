"""Azure's Scheduled Events and the one item of its instance metadata that goes with them."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from datetime import datetime, timezone
from email.utils import format_datetime
from typing import Any

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.testing.metadata.server import MetadataServer, Reply, Request


class FakeAzure(MetadataServer):
    """``slow_first_call``: the first call for events waits until `finish_first_call` (the real one: up to two minutes).

    An event keeps its id when it starts; every change raises the incarnation.
    """

    EVENTS = "/metadata/scheduledevents"

    def __init__(
        self, *, clock: Clock = SYSTEM_CLOCK, machine: str = "trainer-0", slow_first_call: bool = False
    ) -> None:
        super().__init__(clock=clock)
        self.machine = machine
        self.acknowledged: list[str] = []
        self._enabled = threading.Event()
        if not slow_first_call:
            self._enabled.set()
        self._incarnation = 1
        self._events: dict[str, dict[str, Any]] = {}

    def finish_first_call(self) -> None:
        self._enabled.set()

    def schedule(
        self,
        event_id: str,
        event_type: str,
        at: float,
        *,
        resources: Sequence[str] | None = None,
        source: str = "Platform",
    ) -> None:
        """Announce an event; ``event_type`` is Freeze, Reboot, Redeploy, Preempt or Terminate."""
        self._events[event_id] = {
            "EventId": event_id,
            "EventType": event_type,
            "ResourceType": "VirtualMachine",
            "Resources": list(resources or [self.machine]),
            "EventStatus": "Scheduled",
            "NotBefore": format_datetime(datetime.fromtimestamp(at, timezone.utc), usegmt=True),
            "Description": f"{event_type} of the host",
            "EventSource": source,
            "DurationInSeconds": -1,
        }
        self._incarnation += 1

    def start(self, event_id: str) -> None:
        """The event happens now: NotBefore is empty from here on."""
        self._events[event_id].update(EventStatus="Started", NotBefore="")
        self._incarnation += 1

    def remove(self, event_id: str) -> None:
        """The event is done, or was cancelled: it is simply not there any more."""
        del self._events[event_id]
        self._incarnation += 1

    def answer(self, request: Request) -> Reply:
        if request.headers.get("metadata", "").lower() != "true" or "api-version" not in request.query:
            return Reply(400, '{"error": "Bad request. Required metadata header or api-version not specified"}')
        if request.path == "/metadata/instance/compute/name":
            return Reply(200, self.machine)
        if request.path != self.EVENTS:
            return Reply(404)
        if request.method == "POST":
            return self._acknowledge(request.body)
        while not self._enabled.wait(0.02):
            if self.released.is_set():
                break
        document = {"DocumentIncarnation": self._incarnation, "Events": list(self._events.values())}
        return Reply(200, json.dumps(document), {"Content-Type": "application/json"})

    def _acknowledge(self, body: bytes) -> Reply:
        try:
            wanted = [str(start["EventId"]) for start in json.loads(body)["StartRequests"]]
        except (ValueError, KeyError, TypeError):
            return Reply(400, '{"error": "malformed payload"}')
        for event_id in wanted:
            # Acknowledging twice, or late, is no error.
            if event_id in self._events and self._events[event_id]["EventStatus"] == "Scheduled":
                self.start(event_id)
        self.acknowledged += wanted
        return Reply(200)
