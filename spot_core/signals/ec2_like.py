"""The metadata protocol that EC2 began and others copied: a session token by PUT, one text per path, 404 for "nothing".

Protocol: the AWS EC2 user guide, "Use the Instance Metadata Service" and "Spot Instance interruption notices".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.metadata import MetadataClient, unexpected
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

RENEW_BEFORE_S = 15.0
TOKENLESS_S = 300.0
"""How long to go without a token before asking for one again."""


@dataclass(frozen=True)
class Dialect:
    """What one provider calls things. ``token_path`` None: the provider has no tokens."""

    name: str
    base_url: str
    token_path: str | None = None
    ttl_header: str = ""
    token_header: str = ""
    token_ttl_s: int = 3600


class Ec2LikeClient:
    """Reads paths of an EC2-like service, with or without a token.

    A PUT without an answer is what a container behind a hop limit of 1 sees: then the path is tried without a token
    (version 1 of the protocol), which either works or answers 401.
    """

    def __init__(self, dialect: Dialect, *, clock: Clock = SYSTEM_CLOCK, timeout_s: float = 2.0) -> None:
        self.dialect = dialect
        self._clock = clock
        self._client = MetadataClient(dialect.base_url, timeout_s=timeout_s)
        self._token: str | None = None
        self._token_ends = 0.0
        self._tokenless_until: float | None = None
        self._why_tokenless = ""

    @property
    def version(self) -> str:
        """For the state line: how requests are made."""
        if self.dialect.token_path is None:
            return "no token needed"
        return f"without a token ({self._why_tokenless})" if self._tokenless_until is not None else "with a token"

    def get(self, path: str) -> str | None:
        """The text at ``path``, None when the service has nothing there (404). Raises LookFailed."""
        response = self._client.request("GET", path, headers=self._auth())
        if response.status_code == 401 and self.dialect.token_path is not None:
            # Expired early, or version 1 was just switched off: drop what we have and ask once more.
            self._token = None
            self._tokenless_until = None
            headers = self._auth()
            response = self._client.request("GET", path, headers=headers)
            if response.status_code == 401 and not headers:
                raise LookFailed(
                    f"{self.dialect.name} metadata wants a token and gives none ({self._why_tokenless}). "
                    "In a container, raise the instance's HttpPutResponseHopLimit to 2."
                )
        if response.status_code == 404:
            return None
        if response.status_code != 200:
            raise unexpected(response)
        return response.text

    def _auth(self) -> dict[str, str]:
        token = self._current_token()
        return {} if token is None else {self.dialect.token_header: token}

    def _current_token(self) -> str | None:
        path = self.dialect.token_path
        if path is None:
            return None
        now = self._clock.monotonic()
        if self._token is not None and now < self._token_ends - RENEW_BEFORE_S:
            return self._token
        if self._tokenless_until is not None and now < self._tokenless_until:
            return None
        asked = self.dialect.token_ttl_s
        try:
            response = self._client.request("PUT", path, headers={self.dialect.ttl_header: str(asked)})
        except LookFailed as error:
            self._go_tokenless(f"the token request got no answer: {error}")
            return None
        if response.status_code in (403, 404, 405):
            self._go_tokenless(f"the token request was answered {response.status_code}")
            return None
        if response.status_code != 200:
            raise unexpected(response)
        given = response.headers.get(self.dialect.ttl_header, "")
        self._token = response.text.strip()
        self._token_ends = now + (int(given) if given.isdigit() else asked)
        self._tokenless_until = None
        return self._token

    def _go_tokenless(self, why: str) -> None:
        if self._tokenless_until is None:
            logger.debug("%s metadata: going on without a token: %s", self.dialect.name, why)
        self._token = None
        self._tokenless_until = self._clock.monotonic() + TOKENLESS_S
        self._why_tokenless = why

    def close(self) -> None:
        self._client.close()


def utc(text: str) -> float:
    """``2017-09-18T08:22:00Z`` as unix seconds. Raises ValueError."""
    whole = text.strip().removesuffix("Z").split(".")[0]
    return datetime.strptime(whole, "%Y-%m-%dT%H:%M:%S").replace(tzinfo=timezone.utc).timestamp()


def utc8(text: str) -> float:
    """``2018-08-18 12:05:33`` in UTC+8 as unix seconds. Raises ValueError."""
    east = timezone(timedelta(hours=8))
    return datetime.strptime(text.strip(), "%Y-%m-%d %H:%M:%S").replace(tzinfo=east).timestamp()


class TerminationTime(BaseSource):
    """A service that shows one termination time at one path, and 404 before (Alibaba, Tencent)."""

    def __init__(
        self,
        dialect: Dialect,
        path: str,
        parse: Callable[[str], float],
        *,
        clock: Clock = SYSTEM_CLOCK,
        every_s: float = 5.0,
        timeout_s: float = 2.0,
    ) -> None:
        super().__init__(clock=clock)
        self.name = dialect.name
        self.every_s = every_s
        self._path = path
        self._parse = parse
        self._client = Ec2LikeClient(dialect, clock=clock, timeout_s=timeout_s)

    def describe(self) -> str:
        return f"{self._client.version}, every {self.every_s:g} s"

    def look(self) -> Iterable[Notice]:
        text = self._client.get(self._path)
        if text is None:
            return
        deadline = self._parse(text)
        if not self.is_stale(deadline):
            yield Notice(f"{self.name}:termination-time", NoticeKind.PREEMPTION, self.name, deadline, text.strip())

    def close(self) -> None:
        super().close()
        self._client.close()
