"""Google Cloud: ``preempted`` and ``maintenance-event`` of the metadata server, each by its own long poll.

Protocol: Compute Engine, "Querying metadata: waiting for changes" and "Getting notice of host maintenance". The first
request does not wait: a preemption from before it would otherwise never be seen. Later ones carry ``last_etag``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals import kubernetes
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.context import Context, Plugin
from spot_core.signals.metadata import MetadataClient, unexpected
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

BASE_URL = "http://169.254.169.254"
"""The address behind ``metadata.google.internal``; used as such, so that no name server has to answer."""
FLAVOR = {"Metadata-Flavor": "Google"}
NOTICE_S = 30.0
"""From ``preempted`` to the end of a spot machine, best effort, unless it has a longer notice configured."""
NOTICE_GKE_S = 15.0
"""What pods get of it when the node shuts down."""
MAINTENANCE_S = 60.0
"""Warning before host maintenance of a machine without a GPU (with one: an hour)."""


class _Key(BaseSource):
    """One metadata key, followed by its ETag."""

    path = ""

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        clock: Clock = SYSTEM_CLOCK,
        wait_s: int = 30,
        timeout_s: float = 2.0,
        every_s: float = 1.0,
    ) -> None:
        super().__init__(clock=clock)
        self._client = MetadataClient(base_url, timeout_s=timeout_s, headers=FLAVOR)
        self._timeout_s = timeout_s
        self._wait_s = wait_s
        self._pause_s = every_s
        self.every_s = 0.0
        self._etag: str | None = None
        self._since: dict[str, float] = {}

    def describe(self) -> str:
        return f"{self.path}, waiting for changes" if self.every_s == 0.0 else f"{self.path}, every {self.every_s:g} s"

    def _read(self) -> str:
        """The key's value, after a change or the time-out. Raises LookFailed."""
        params, timeout_s = {}, self._timeout_s
        if self._etag is not None:
            params = {"wait_for_change": "true", "last_etag": self._etag, "timeout_sec": str(self._wait_s)}
            timeout_s += self._wait_s
        began = self._clock.monotonic()
        response = self._client.request("GET", self.path, params=params, timeout_s=timeout_s)
        if response.status_code != 200:
            raise unexpected(response)
        if response.headers.get("Metadata-Flavor") != "Google":
            raise LookFailed(f"{response.request.url} was answered by something that is not Google's metadata server")
        etag = response.headers.get("ETag")
        waited = self._clock.monotonic() - began
        # A server (or a proxy) that does not wait would be asked in a hot loop.
        unwaited = params and etag == self._etag and waited < min(1.0, self._wait_s / 2)
        self.every_s = self._pause_s if etag is None or unwaited else 0.0
        self._etag = etag
        return response.text.strip()

    def _first_seen(self, value: str) -> float:
        """When this value appeared: deadlines count from there and do not move."""
        if value not in self._since:
            self._since = {value: self._clock.now()}
        return self._since[value]

    def close(self) -> None:
        super().close()
        self._client.close()


class GcpPreempted(_Key):
    """``notice_s``: seconds from the flag to the end of the machine, or of the pod."""

    name = "gcp"
    path = "/computeMetadata/v1/instance/preempted"

    def __init__(self, base_url: str = BASE_URL, *, notice_s: float = NOTICE_S, **options: object) -> None:
        super().__init__(base_url, **options)  # type: ignore[arg-type]
        self._notice_s = notice_s

    def look(self) -> Iterable[Notice]:
        value = self._read()
        if value == "TRUE":
            deadline = self._first_seen(value) + self._notice_s
            yield Notice("gcp:preempted", NoticeKind.PREEMPTION, self.name, deadline, "preempted")
        elif value != "FALSE":
            raise LookFailed(f"{self.path} holds {value[:80]!r}, neither TRUE nor FALSE")


class GcpMaintenance(_Key):
    """A live migration is an advisory: the machine pauses but lives."""

    name = "gcp-maintenance"
    path = "/computeMetadata/v1/instance/maintenance-event"

    def __init__(self, base_url: str = BASE_URL, *, notice_s: float = MAINTENANCE_S, **options: object) -> None:
        super().__init__(base_url, **options)  # type: ignore[arg-type]
        self._notice_s = notice_s
        self._announced: Notice | None = None

    def look(self) -> Iterable[Notice]:
        value = self._read()
        notice = self._meaning(value)
        if self._announced is not None and (notice is None or notice.id != self._announced.id):
            yield self._announced.cancelled(f"maintenance-event is {value}")
        self._announced = notice
        if notice is not None:
            yield notice

    def _meaning(self, value: str) -> Notice | None:
        if value == "TERMINATE_ON_HOST_MAINTENANCE":
            deadline = self._first_seen(value) + self._notice_s
            return Notice("gcp:terminate-on-maintenance", NoticeKind.MAINTENANCE, self.name, deadline, value)
        if value == "MIGRATE_ON_HOST_MAINTENANCE":
            return Notice("gcp:migrate-on-maintenance", NoticeKind.ADVISORY, self.name, None, value)
        self._since = {}
        if value != "NONE":
            logger.debug("gcp: unknown maintenance-event %r", value)
        return None


def _base_url(context: Context) -> str:
    host = context.env.get("GCE_METADATA_HOST", "")
    return f"http://{host}" if host else BASE_URL


def _probe(context: Context) -> str | None:
    client = MetadataClient(_base_url(context), timeout_s=context.probe_s, headers=FLAVOR)
    try:
        response = client.request("GET", "/computeMetadata/v1/instance/scheduling/preemptible")
    finally:
        client.close()
    if response.status_code != 200 or response.headers.get("Metadata-Flavor") != "Google":
        return None
    return "spot" if response.text.strip() == "TRUE" else "not a spot machine"


def _make(context: Context) -> list[_Key]:
    base_url = _base_url(context)
    notice_s = NOTICE_GKE_S if kubernetes.in_pod(context.env) else NOTICE_S
    return [
        GcpPreempted(base_url, notice_s=notice_s, clock=context.clock),
        GcpMaintenance(base_url, clock=context.clock),
    ]


PLUGIN = Plugin("gcp", _make, _probe, vendors=("Google",), endpoint_env="GCE_METADATA_HOST")
