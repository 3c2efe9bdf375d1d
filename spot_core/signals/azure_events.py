"""Azure Scheduled Events.

Protocol: "Azure Metadata Service: Scheduled Events for Linux VMs", api-version 2020-07-01. The first call switches
the service on and may take two minutes; events name machines of the whole availability set; an event vanishes when it
is done or cancelled.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from email.utils import parsedate_to_datetime
from typing import Any

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.context import Context, Plugin
from spot_core.signals.metadata import MetadataClient, unexpected
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

BASE_URL = "http://169.254.169.254"
ENDPOINT_ENV = "SPOT_AZURE_METADATA"
HEADERS = {"Metadata": "true"}
EVENTS = "/metadata/scheduledevents"
EVENTS_VERSION = {"api-version": "2020-07-01"}
NAME = "/metadata/instance/compute/name"
NAME_VERSION = {"api-version": "2021-02-01", "format": "text"}
FIRST_CALL_S = 150.0

_KINDS = {
    # A freeze keeps memory; collectives may time out over it, so a save beforehand is worth its cost.
    "Freeze": NoticeKind.ADVISORY,
    "Reboot": NoticeKind.MAINTENANCE,
    "Redeploy": NoticeKind.MAINTENANCE,
    "Preempt": NoticeKind.PREEMPTION,
    "Terminate": NoticeKind.PREEMPTION,
}


class AzureSource(BaseSource):
    """Polls once a second, as documented: Preempt gives 30 s at best.

    With ``acknowledge`` the platform is told to go ahead when ``ack`` is called. That starts the event for every
    machine that it names, so it belongs after the joint save.
    """

    name = "azure"

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        clock: Clock = SYSTEM_CLOCK,
        every_s: float = 1.0,
        timeout_s: float = 5.0,
        first_call_s: float = FIRST_CALL_S,
        acknowledge: bool = False,
    ) -> None:
        super().__init__(clock=clock)
        self.every_s = every_s
        self._client = MetadataClient(base_url, timeout_s=timeout_s, headers=HEADERS)
        self._first_call_s: float | None = first_call_s
        self._acknowledge = acknowledge
        self._machine = ""
        self._incarnation: int | None = None
        self._active: dict[str, Notice] = {}
        self._startable: tuple[str, ...] = ()

    def describe(self) -> str:
        if self._first_call_s is not None:
            return "the first call, which may take two minutes, has not been answered yet"
        return f"events for {self._machine}, every {self.every_s:g} s"

    def look(self) -> Iterable[Notice]:
        if not self._machine:
            self._machine = self._own_name()
        document = self._document()
        incarnation = document.get("DocumentIncarnation")
        if incarnation is None or incarnation != self._incarnation:
            before, self._active = self._active, self._read(document)
            self._incarnation = incarnation
            for identity, notice in before.items():
                if identity not in self._active:
                    yield notice.cancelled("the event is gone: done or cancelled")
        yield from self._active.values()

    def _own_name(self) -> str:
        response = self._client.request("GET", NAME, params=NAME_VERSION)
        if response.status_code != 200 or not response.text.strip():
            raise unexpected(response)
        return response.text.strip()

    def _document(self) -> dict[str, Any]:
        response = self._client.request("GET", EVENTS, params=EVENTS_VERSION, timeout_s=self._first_call_s)
        if response.status_code != 200:
            raise unexpected(response)
        try:
            document = response.json()
        except ValueError as error:
            raise LookFailed(f"scheduled events are not JSON: {response.text[:80]!r}") from error
        if not isinstance(document, dict) or not isinstance(document.get("Events"), list):
            raise LookFailed(f"scheduled events without a list of events: {response.text[:80]!r}")
        self._first_call_s = None
        return document

    def _read(self, document: dict[str, Any]) -> dict[str, Notice]:
        active: dict[str, Notice] = {}
        startable = []
        for event in document["Events"]:
            if not isinstance(event, dict):
                raise LookFailed(f"a scheduled event is no object: {event!r}")
            kind = _KINDS.get(str(event.get("EventType")))
            if kind is None:
                logger.debug("azure: event of unknown type %r", event.get("EventType"))
                continue
            if self._machine.lower() not in (str(name).lower() for name in event.get("Resources") or ()):
                continue
            event_id = str(event["EventId"]) if "EventId" in event else ""
            if not event_id:
                raise LookFailed(f"a scheduled event without an EventId: {event!r}")
            identity = f"azure:{event_id}"
            active[identity] = Notice(identity, kind, self.name, self._deadline(identity, kind, event), _words(event))
            if event.get("EventStatus") == "Scheduled":
                startable.append(event_id)
        self._startable = tuple(startable)
        return active

    def _deadline(self, identity: str, kind: NoticeKind, event: dict[str, Any]) -> float | None:
        if kind is NoticeKind.ADVISORY:
            return None
        not_before = str(event.get("NotBefore") or "")
        if not_before:
            return parsedate_to_datetime(not_before).timestamp()
        # Started: it is happening. The time of a notice that was seen before stays what it was.
        earlier = self._active.get(identity)
        return min(earlier.deadline, self._clock.now()) if earlier and earlier.deadline else self._clock.now()

    def ack(self) -> None:
        """Start the scheduled events that name this machine, if ``acknowledge`` was asked for. Never raises."""
        if not self._acknowledge or not self._startable:
            return
        body = {"StartRequests": [{"EventId": event_id} for event_id in self._startable]}
        try:
            response = self._client.request("POST", EVENTS, params=EVENTS_VERSION, json=body)
            if response.status_code != 200:
                raise unexpected(response)
        except LookFailed as error:
            logger.warning("azure: the events were not acknowledged and start at their own time: %s", error)
        else:
            logger.info("azure: acknowledged %s", ", ".join(self._startable))
            self._startable = ()

    def close(self) -> None:
        super().close()
        self._client.close()


def _words(event: dict[str, Any]) -> str:
    words = f"{event.get('EventType')} {event.get('EventStatus')}"
    return f"{words}: {event['Description']}" if event.get("Description") else words


def _base_url(context: Context) -> str:
    return context.env.get(ENDPOINT_ENV, BASE_URL)


def _probe(context: Context) -> str | None:
    client = MetadataClient(_base_url(context), timeout_s=context.probe_s, headers=HEADERS)
    try:
        response = client.request("GET", NAME, params=NAME_VERSION)
    finally:
        client.close()
    return response.text.strip() if response.status_code == 200 else None


def _make(context: Context) -> list[AzureSource]:
    acknowledge = context.env.get("SPOT_AZURE_ACKNOWLEDGE", "") == "1"
    return [AzureSource(_base_url(context), clock=context.clock, acknowledge=acknowledge)]


PLUGIN = Plugin("azure", _make, _probe, vendors=("Microsoft Corporation",), endpoint_env=ENDPOINT_ENV)
