"""From what an fsspec backend raises to what its handler will do.

Backends raise OS errors, their client library's own classes, or errors that only carry an HTTP status. The classes are
told by name, so that no client library needs to be there.
"""

from __future__ import annotations

import asyncio
from typing import Any

from spot_core.errors import AccessError, KeyExistsError, KeyMissingError, StoreError, TransientStoreError
from spot_core.store._errno import translate

__all__ = ["translate_backend"]

_TRANSIENT = {
    "aiohttp.client_exceptions.ClientError",
    "azure.core.exceptions.ServiceRequestError",
    "azure.core.exceptions.ServiceResponseError",
    "botocore.exceptions.ConnectionError",
    "botocore.exceptions.HTTPClientError",
    "google.auth.exceptions.TransportError",
    "requests.exceptions.ConnectionError",
    "requests.exceptions.Timeout",
}
_ACCESS = {
    "azure.core.exceptions.ClientAuthenticationError",
    "botocore.exceptions.NoCredentialsError",
    "botocore.exceptions.PartialCredentialsError",
    "google.auth.exceptions.GoogleAuthError",
}
_REMOTE_IO = 121  # EREMOTEIO: s3fs spells "InternalError" and "SlowDown" so, which pass


def translate_backend(error: Exception, verb: str, key: str, uri: str, why: str) -> StoreError:
    """The `StoreError` for what a backend raised; `why` is its text, already free of secrets."""
    if isinstance(error, StoreError):
        return error
    where = f"Cannot {verb} {key or 'the root'} at {uri}: {type(error).__name__}: {why}."
    status = _status(error)
    if status is not None and status != 200:
        found = _by_status(status, where)
        if found is not None:
            return found
    names = {f"{cls.__module__}.{cls.__qualname__}" for cls in type(error).__mro__}
    if isinstance(error, (asyncio.TimeoutError, TimeoutError)) or names & _TRANSIENT:
        return TransientStoreError(where)
    if names & _ACCESS:
        return AccessError(where, hint="Check the credentials of this process.")
    if isinstance(error, OSError):
        if error.errno is None and why.startswith("Forbidden: "):  # how gcsfs says 403
            return AccessError(where, hint="Check the credentials and rights of this process.")
        if error.errno == _REMOTE_IO:
            return TransientStoreError(where)
        translated = translate(error, verb, key, uri)
        # The kind is what counts; the backend's own words say more than an errno's.
        return type(translated)(where, reason=translated.reason, hint=translated.hint)
    return StoreError(where)


def _by_status(status: int, where: str) -> StoreError | None:
    if status in (401, 403):
        return AccessError(where, hint="Check the credentials and rights of this process.")
    if status == 404:
        return KeyMissingError(where)
    if status == 412:
        return KeyExistsError(where)
    # 409 is a conditional put that met another one in flight: trying again tells who won.
    if status in (408, 409, 425, 429) or status >= 500:
        return TransientStoreError(where)
    return None


def _status(error: BaseException) -> int | None:
    """The HTTP status that an error, or its cause, carries in one of the ways that client libraries have."""
    for candidate in (error, error.__cause__):
        response: Any = getattr(candidate, "response", None)
        if isinstance(response, dict):
            status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
            if response.get("Error", {}).get("Code") == "PreconditionFailed":
                return 412
            if isinstance(status, int):
                return status
        for name in ("status_code", "status", "code"):
            value = getattr(candidate, name, None)
            if isinstance(value, str) and value.isdigit():
                value = int(value)
            if isinstance(value, int) and not isinstance(value, bool) and 100 <= value < 600:
                return value
    return None
