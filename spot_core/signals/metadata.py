"""HTTP to a metadata service: no proxy, no redirect, one kept connection, short time-outs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from spot_core.signals.base import LookFailed


class MetadataClient:
    """A client for one link-local address.

    ``trust_env`` is off: a proxy from the environment would answer in the place of the machine's own service.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 2.0, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._http = httpx.Client(
            base_url=self.base_url,
            timeout=timeout_s,
            headers=dict(headers or {}),
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(max_connections=2, max_keepalive_connections=1),
        )

    def request(
        self,
        method: str,
        path: str,
        *,
        headers: Mapping[str, str] | None = None,
        params: Mapping[str, str] | None = None,
        json: Any = None,
        timeout_s: float | None = None,
    ) -> httpx.Response:
        """One request, any status. Raises LookFailed when no answer came."""
        try:
            return self._http.request(
                method,
                path,
                headers=dict(headers or {}),
                params=dict(params or {}),
                json=json,
                timeout=self._http.timeout if timeout_s is None else timeout_s,
            )
        except httpx.HTTPError as error:
            raise LookFailed(f"{method} {self.base_url}{path}: {type(error).__name__}: {error}") from error

    def close(self) -> None:
        self._http.close()


def unexpected(response: httpx.Response) -> LookFailed:
    """What to raise for a status that the protocol does not use for an answer (503, 429, a proxy's 302)."""
    request = response.request
    return LookFailed(f"{request.method} {request.url}: answered {response.status_code}")
