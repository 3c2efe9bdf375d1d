"""AWS EC2: spot interruption, rebalance recommendation, scheduled maintenance, over the instance metadata service.

Protocol: EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations", "Scheduled
events". Two minutes' notice at best; a hibernation begins at once.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import Any

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.context import Context, Plugin
from spot_core.signals.ec2_like import Dialect, Ec2LikeClient, utc
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

BASE_URL = "http://169.254.169.254"
_STOPS = frozenset({"system-reboot", "instance-reboot", "instance-retirement", "instance-stop"})
_PAUSES = frozenset({"system-maintenance"})
_MAINTENANCE_EVERY_S = 60.0


def dialect(base_url: str = BASE_URL, token_ttl_s: int = 3600) -> Dialect:
    return Dialect(
        name="aws",
        base_url=base_url,
        token_path="/latest/api/token",
        ttl_header="X-aws-ec2-metadata-token-ttl-seconds",
        token_header="X-aws-ec2-metadata-token",
        token_ttl_s=token_ttl_s,
    )


class AwsSource(BaseSource):
    """Polls every 5 s (the documented pace); maintenance, known days ahead, once a minute."""

    name = "aws"

    def __init__(
        self,
        base_url: str = BASE_URL,
        *,
        clock: Clock = SYSTEM_CLOCK,
        every_s: float = 5.0,
        timeout_s: float = 2.0,
        token_ttl_s: int = 3600,
        life_cycle: str = "",
    ) -> None:
        super().__init__(clock=clock)
        self.every_s = every_s
        self._client = Ec2LikeClient(dialect(base_url, token_ttl_s), clock=clock, timeout_s=timeout_s)
        self._life_cycle = life_cycle
        self._hibernates_since: float | None = None
        self._maintenance_at: float | None = None
        self._maintenance: list[Notice] = []

    def describe(self) -> str:
        kind = f"{self._life_cycle} instance, " if self._life_cycle else ""
        return f"{kind}{self._client.version}, every {self.every_s:g} s"

    def look(self) -> Iterable[Notice]:
        yield from self._interruption()
        yield from self._rebalance()
        yield from self._scheduled()

    def _interruption(self) -> Iterable[Notice]:
        text = self._client.get("/latest/meta-data/spot/instance-action")
        if text is None:
            yield from self._termination_time()
            return
        body = _parsed(text, dict)
        action = str(body.get("action", ""))
        if action == "hibernate":
            # The time in the body is no lead: hibernation begins with the notice.
            if self._hibernates_since is None:
                self._hibernates_since = self._clock.now()
            deadline = self._hibernates_since
        else:
            # An action that we do not know still interrupts the instance at the time it names.
            deadline = utc(str(body["time"])) if "time" in body else self._clock.now()
            if self.is_stale(deadline):
                return
        # No time in the id: the newest deadline of the same interruption counts.
        yield Notice("aws:spot-interruption", NoticeKind.PREEMPTION, self.name, deadline, f"spot {action}")

    def _termination_time(self) -> Iterable[Notice]:
        """The path from before ``instance-action``; it may hold text that is no time, and keeps a time that was not
        acted on."""
        text = self._client.get("/latest/meta-data/spot/termination-time")
        try:
            deadline = None if text is None else utc(text)
        except ValueError:
            return
        if deadline is not None and not self.is_stale(deadline):
            yield Notice("aws:spot-interruption", NoticeKind.PREEMPTION, self.name, deadline, "spot terminate")

    def _rebalance(self) -> Iterable[Notice]:
        text = self._client.get("/latest/meta-data/events/recommendations/rebalance")
        if text is None:
            return
        noticed = str(_parsed(text, dict).get("noticeTime", ""))
        yield Notice(f"aws:rebalance:{noticed}", NoticeKind.ADVISORY, self.name, None, "rebalance recommendation")

    def _scheduled(self) -> Iterable[Notice]:
        now = self._clock.monotonic()
        if self._maintenance_at is None or now - self._maintenance_at >= _MAINTENANCE_EVERY_S:
            text = self._client.get("/latest/meta-data/events/maintenance/scheduled")
            self._maintenance = [] if not text else list(self._events(_parsed(text, list)))
            self._maintenance_at = now
        yield from self._maintenance

    def _events(self, events: list[Any]) -> Iterable[Notice]:
        for event in events:
            if not isinstance(event, dict):
                raise LookFailed(f"aws metadata lists a scheduled event that is no object: {event!r}")
            code, state = str(event.get("Code", "")), str(event.get("State", ""))
            if code not in _STOPS | _PAUSES:
                logger.debug("aws: scheduled event of unknown code %r", code)
                continue
            identity = f"aws:{event.get('EventId', code)}"
            if state != "active":
                # "[Completed]" and "[Canceled]" events stay listed for days.
                yield Notice(identity, NoticeKind.CANCELLED, self.name, None, f"{code} is {state}")
            elif code in _PAUSES:
                yield Notice(identity, NoticeKind.ADVISORY, self.name, None, f"{code} at {event.get('NotBefore')}")
            else:
                deadline = _event_time(str(event.get("NotBefore")))
                if not self.is_stale(deadline):
                    yield Notice(identity, NoticeKind.MAINTENANCE, self.name, deadline, code)

    def close(self) -> None:
        super().close()
        self._client.close()


def _parsed(text: str, kind: type) -> Any:
    try:
        value = json.loads(text)
    except ValueError as error:
        raise LookFailed(f"aws metadata answered something that is not JSON: {text[:80]!r}") from error
    if not isinstance(value, kind):
        raise LookFailed(
            f"aws metadata answered {type(value).__name__} where {kind.__name__} was expected: {text[:80]!r}"
        )
    return value


def _event_time(text: str) -> float:
    """``21 Jan 2019 09:00:43 GMT`` as unix seconds."""
    return datetime.strptime(text, "%d %b %Y %H:%M:%S GMT").replace(tzinfo=timezone.utc).timestamp()


def _base_url(context: Context) -> str:
    return context.env.get("AWS_EC2_METADATA_SERVICE_ENDPOINT", BASE_URL)


def _probe(context: Context) -> str | None:
    if context.env.get("AWS_EC2_METADATA_DISABLED", "").lower() == "true":
        return None
    client = Ec2LikeClient(dialect(_base_url(context)), clock=context.clock, timeout_s=context.probe_s)
    try:
        # OpenStack serves the same paths but not this one.
        return client.get("/latest/meta-data/instance-life-cycle")
    finally:
        client.close()


def _make(context: Context) -> list[AwsSource]:
    return [AwsSource(_base_url(context), clock=context.clock, life_cycle=context.found)]


PLUGIN = Plugin("aws", _make, _probe, vendors=("Amazon EC2",), endpoint_env="AWS_EC2_METADATA_SERVICE_ENDPOINT")
