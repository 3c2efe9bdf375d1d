"""AWS IMDS, and those that speak like it: a session token by PUT, one text per path."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from typing import Any

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.testing.metadata.server import MetadataServer, Reply, Request

_MISSING = Reply(404, "<html>404 - Not Found</html>")


def _utc(at: float) -> str:
    return datetime.fromtimestamp(at, timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


class FakeEc2Like(MetadataServer):
    """Texts at paths from a set time on, behind tokens that end.

    ``token_required`` False is version 1 switched on beside version 2. `revoke` makes all tokens given so far invalid.
    """

    token_path: str | None = None
    ttl_header = ""
    token_header = ""

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, token_required: bool = True) -> None:
        super().__init__(clock=clock)
        self.token_required = token_required
        self._tokens: dict[str, float] = {}
        self._given = 0
        self._texts: dict[str, tuple[float, str]] = {}

    def show(self, path: str, text: str, *, since: float = float("-inf")) -> None:
        """Serve ``text`` at ``path`` from unix time ``since`` on; before, the path is 404."""
        self._texts[path] = (since, text)

    def hide(self, path: str) -> None:
        self._texts.pop(path, None)

    def revoke(self) -> None:
        self._tokens.clear()

    def answer(self, request: Request) -> Reply:
        if request.method == "PUT":
            return self._token(request)
        if request.method != "GET":
            return Reply(405)
        if self.token_path is not None:
            token = request.headers.get(self.token_header.lower())
            good = token is not None and self.clock.monotonic() < self._tokens.get(token, 0.0)
            # A bad token is refused even where none is needed.
            if not good and (token is not None or self.token_required):
                return Reply(401, "<html>401 - Unauthorized</html>")
        since, text = self._texts.get(request.path, (float("inf"), ""))
        return Reply(200, text) if self.clock.now() >= since else _MISSING

    def _token(self, request: Request) -> Reply:
        if self.token_path is None or request.path != self.token_path:
            return _MISSING
        ttl = request.headers.get(self.ttl_header.lower(), "")
        if not ttl.isdigit() or not 1 <= int(ttl) <= 21600:
            return Reply(400, "<html>400 - Bad Request</html>")
        self._given += 1
        token = f"token-{self._given}"
        self._tokens[token] = self.clock.monotonic() + int(ttl)
        return Reply(200, token, {self.ttl_header: ttl})


class FakeAws(FakeEc2Like):
    token_path = "/latest/api/token"
    ttl_header = "X-aws-ec2-metadata-token-ttl-seconds"
    token_header = "X-aws-ec2-metadata-token"

    INSTANCE_ACTION = "/latest/meta-data/spot/instance-action"
    TERMINATION_TIME = "/latest/meta-data/spot/termination-time"
    REBALANCE = "/latest/meta-data/events/recommendations/rebalance"
    SCHEDULED = "/latest/meta-data/events/maintenance/scheduled"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, token_required: bool = True) -> None:
        super().__init__(clock=clock, token_required=token_required)
        self.show("/latest/meta-data/instance-life-cycle", "spot")
        self.show(self.SCHEDULED, "[]")

    def interrupt(self, action: str, at: float, *, since: float = float("-inf")) -> None:
        """Mark the instance: ``action`` is terminate, stop or hibernate. The legacy path shows terminations only."""
        self.show(self.INSTANCE_ACTION, json.dumps({"action": action, "time": _utc(at)}), since=since)
        if action == "terminate":
            self.show(self.TERMINATION_TIME, _utc(at), since=since)

    def recommend_rebalance(self, at: float) -> None:
        self.show(self.REBALANCE, json.dumps({"noticeTime": _utc(at)}))

    def schedule(self, code: str, at: float, *, event_id: str = "instance-event-0001", state: str = "active") -> None:
        start = datetime.fromtimestamp(at, timezone.utc)
        event: dict[str, Any] = {
            "NotBefore": _without_leading_zero(start),
            "NotAfter": _without_leading_zero(start + timedelta(hours=2)),
            "Code": code,
            "Description": f"scheduled {code}",
            "EventId": event_id,
            "State": state,
        }
        self.show(self.SCHEDULED, json.dumps([event]))


def _without_leading_zero(at: datetime) -> str:
    return f"{at.day} {at:%b %Y %H:%M:%S} GMT"


class FakeAlibaba(FakeEc2Like):
    token_path = "/latest/api/token"
    ttl_header = "X-aliyun-ecs-metadata-token-ttl-seconds"
    token_header = "X-aliyun-ecs-metadata-token"

    TERMINATION_TIME = "/latest/meta-data/instance/spot/termination-time"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK, token_required: bool = True) -> None:
        super().__init__(clock=clock, token_required=token_required)
        self.show("/latest/meta-data/instance-id", "i-fake")

    def terminate(self, at: float, *, since: float = float("-inf")) -> None:
        self.show(self.TERMINATION_TIME, _utc(at), since=since)


class FakeTencent(FakeEc2Like):
    TERMINATION_TIME = "/latest/meta-data/spot/termination-time"

    def __init__(self, *, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(clock=clock, token_required=False)
        self.show("/latest/meta-data/instance-id", "ins-fake")

    def terminate(self, at: float, *, since: float = float("-inf")) -> None:
        """The time is written in UTC+8."""
        east = datetime.fromtimestamp(at, timezone(timedelta(hours=8)))
        self.show(self.TERMINATION_TIME, east.strftime("%Y-%m-%d %H:%M:%S"), since=since)
