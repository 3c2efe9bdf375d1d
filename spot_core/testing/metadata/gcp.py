"""Google's metadata server: keys with ETags, waiting for a change."""

from __future__ import annotations

import hashlib
import threading

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.testing.metadata.server import MetadataServer, Reply, Request

_FLAVOR = {"Metadata-Flavor": "Google", "Server": "Metadata Server for VM"}
_ROOT = "/computeMetadata/v1/instance/"


class FakeGcp(MetadataServer):
    """``waits`` False is a server (or proxy) that ignores ``wait_for_change``; ``flavor`` False leaves the header out
    of answers, as something that is not the metadata server does.
    """

    PREEMPTED = _ROOT + "preempted"
    MAINTENANCE = _ROOT + "maintenance-event"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, waits: bool = True, flavor: bool = True) -> None:
        super().__init__(clock=clock)
        self.waits = waits
        self.flavor = flavor
        self._changed = threading.Condition()
        self._values = {
            self.PREEMPTED: "FALSE",
            self.MAINTENANCE: "NONE",
            _ROOT + "scheduling/preemptible": "TRUE",
            _ROOT + "scheduling/on-host-maintenance": "TERMINATE",
        }

    def set(self, path: str, value: str) -> None:
        with self._changed:
            self._values[path] = value
            self._changed.notify_all()

    def preempt(self) -> None:
        self.set(self.PREEMPTED, "TRUE")

    def maintenance(self, value: str) -> None:
        """NONE, MIGRATE_ON_HOST_MAINTENANCE or TERMINATE_ON_HOST_MAINTENANCE."""
        self.set(self.MAINTENANCE, value)

    def answer(self, request: Request) -> Reply:
        if request.headers.get("metadata-flavor") != "Google" or "x-forwarded-for" in request.headers:
            return Reply(403, "Forbidden", _FLAVOR)
        with self._changed:
            if request.path not in self._values:
                return Reply(404, "Not Found", _FLAVOR)
            if self.waits and request.query.get("wait_for_change") == "true":
                self._wait(request)
            value = self._values[request.path]
        headers = {**_FLAVOR, "ETag": _etag(request.path, value)}
        if not self.flavor:
            del headers["Metadata-Flavor"]
        return Reply(200, value, headers)

    def _wait(self, request: Request) -> None:
        # Without last_etag the server waits for the next change, and a change from before the request is never seen.
        last = request.query.get("last_etag") or _etag(request.path, self._values[request.path])
        timeout = request.query.get("timeout_sec")
        self._changed.wait_for(
            lambda: _etag(request.path, self._values[request.path]) != last or self.released.is_set(),
            float(timeout) if timeout else None,
        )


def _etag(path: str, value: str) -> str:
    return hashlib.sha256(f"{path}={value}".encode()).hexdigest()[:16]
