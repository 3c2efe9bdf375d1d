"""From what obstore and botocore raise to what its handler will do.

obstore has classes for few cases; the rest is told by the HTTP status and the server's code in its text.
"""

from __future__ import annotations

import re

from spot_core.errors import AccessError, KeyExistsError, KeyMissingError, StoreError, TransientStoreError
from spot_core.store._backend_errors import translate_backend

__all__ = ["translate_cloud"]

_BY_CLASS: dict[str, type[StoreError]] = {
    "AlreadyExistsError": KeyExistsError,
    "PreconditionError": KeyExistsError,
    "PermissionDeniedError": AccessError,
    "UnauthenticatedError": AccessError,
    "FileNotFoundError": KeyMissingError,
}
_STATUS = re.compile(r"(?:status code:?|status:) (\d{3})")
_CODE = re.compile(r"<Code>\s*(\w+)\s*</Code>")
_SAYS = re.compile(r"<Message>\s*([^<\n]{1,200})")
_NO_ACCESS = {
    "AccessDenied",
    "AuthenticationFailed",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}
_NO_PLACE = {"NoSuchBucket", "ContainerNotFound"}
_PASSING = {"InternalError", "RequestTimeout", "ServerBusy", "ServiceUnavailable", "SlowDown", "ThrottlingException"}
_PASSING |= {"BadDigest", "IncompleteBody", "Md5Mismatch", "XAmzContentSHA256Mismatch"}  # damaged on the way there
_REGION = "Set the bucket's region (client_kwargs={'region_name': ...})."
_HINTS = {301: _REGION, 307: _REGION, 400: "Credentials that expired, or another region, are told so too."}
_NETWORK = re.compile(
    r"error sending request|error decoding response|timed out|timeout|connection|connect error|dns error|"
    r"broken pipe|unexpected EOF|response body",
    re.IGNORECASE,
)
_CREDENTIALS = re.compile(r"credential|no valid|token", re.IGNORECASE)


def translate_cloud(error: Exception, verb: str, key: str, uri: str, why: str) -> StoreError:
    """The `StoreError` for what was raised; `why` is its text, already free of secrets."""
    kind = type(error).__name__
    if type(error).__module__.split(".")[0] == "botocore":
        return translate_backend(error, verb, key, uri, why)
    code = found[1] if (found := _CODE.search(why)) else None
    status = int(found[1]) if (found := _STATUS.search(why)) else None
    where = f"Cannot {verb} {key or 'the root'} at {uri}: {_brief(why, code)}."
    access = AccessError(where, hint="Check the credentials and rights of this process.")
    if code in _NO_PLACE:
        return StoreError(where, hint="Does the bucket exist?")
    if code in _NO_ACCESS or status in (401, 403):
        return access
    if kind in _BY_CLASS:
        made = _BY_CLASS[kind]
        return access if made is AccessError else made(where)
    if code in _PASSING or (status is not None and (status >= 500 or status in (408, 409, 425, 429))):
        return TransientStoreError(where)
    if status is not None:
        return StoreError(where, hint=_HINTS.get(status, ""))
    if _NETWORK.search(why):
        return TransientStoreError(where)
    if _CREDENTIALS.search(why):
        return access
    return StoreError(where)


def _brief(why: str, code: str | None) -> str:
    """One line: what failed, and what the server said about it, without the client's own inner picture of it."""
    first = why.strip().split("\n", 1)[0].split("<?xml", 1)[0].split("<Error>", 1)[0].rstrip(" :.")
    first = first[max(0, first.find("Error performing")) :]
    says = found[1].strip().rstrip(".") if (found := _SAYS.search(why)) else ""
    told = " ".join(filter(None, (code, f"({says})" if says else "")))
    return f"{first[:300]}: {told}" if told else first[:300]
