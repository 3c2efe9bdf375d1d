"""HTTP to a metadata service: no proxy, no redirect, one kept connection, short time-outs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from spot_core.signals.base import LookFailed


class MetadataClient:
    """A client for one link-local address. May be used by several threads.

    It stands on httpx's transport, below its client: a proxy from the environment would answer in the place of the
    machine's own service, and the client logs every request, which every few seconds would drown the training's log.
    """

    def __init__(self, base_url: str, *, timeout_s: float = 2.0, headers: Mapping[str, str] | None = None) -> None:
        self.base_url = base_url.rstrip("/")
        self._timeout_s = timeout_s
        self._headers = dict(headers or {})
        self._transport = httpx.HTTPTransport(
            trust_env=False, limits=httpx.Limits(max_connections=2, max_keepalive_connections=1)
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
            timeout = httpx.Timeout(self._timeout_s if timeout_s is None else timeout_s)
            request = httpx.Request(
                method,
                self.base_url + path,
                headers={**self._headers, **(headers or {})},
                params=dict(params or {}),
                json=json,
                extensions={"timeout": timeout.as_dict()},
            )
            response = self._transport.handle_request(request)
            response.request = request
            response.read()
        except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
            raise LookFailed(f"{method} {self.base_url}{path}: {type(error).__name__}: {error}") from error
        return response

    def close(self) -> None:
        self._transport.close()


def unexpected(response: httpx.Response) -> LookFailed:
    """What to raise for a status that the protocol does not use for an answer (503, 429, a proxy's 302)."""
    request = response.request
    return LookFailed(f"{request.method} {request.url}: answered {response.status_code}")
