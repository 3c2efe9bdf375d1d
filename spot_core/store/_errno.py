"""From an operating system error to what its handler will do."""

from __future__ import annotations

import errno

from spot_core.errors import (
    AccessError,
    KeyExistsError,
    KeyMissingError,
    Reason,
    StoreError,
    TransientStoreError,
)

__all__ = ["translate"]

_MISSING = {errno.ENOENT, errno.ENOTDIR}
_ACCESS = {errno.EACCES, errno.EPERM, errno.EROFS}
_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TRANSIENT = {
    errno.EAGAIN,
    errno.EBUSY,
    errno.ECONNABORTED,
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.EHOSTDOWN,
    errno.EHOSTUNREACH,
    errno.EINTR,
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENETUNREACH,
    errno.EPIPE,
    errno.ESTALE,
    errno.ETIMEDOUT,
}


def translate(error: OSError, verb: str, key: str, uri: str) -> StoreError:
    """The `StoreError` for `error`, met while doing `verb` to `key`. An unknown errno stays a plain StoreError."""
    where = f"{key or 'the root'} at {uri}"
    why = error.strerror or type(error).__name__
    number = error.errno
    if number in _MISSING or (number is None and isinstance(error, FileNotFoundError)):
        return KeyMissingError(f"Cannot {verb} {where}: {why}.")
    if number == errno.EEXIST or (number is None and isinstance(error, FileExistsError)):
        return KeyExistsError(f"Cannot {verb} {where}: {why}.")
    if number in _ACCESS or (number is None and isinstance(error, PermissionError)):
        return AccessError(
            f"Cannot {verb} {where}: {why}.", hint="Check the permissions of the identity that runs this process."
        )
    if number in _SPACE:
        return StoreError(
            f"Cannot {verb} {where}: {why}.",
            reason=Reason.NO_SPACE,
            hint="Free space or keep fewer generations; committed generations are untouched.",
        )
    if number in _TRANSIENT or (number is None and isinstance(error, (TimeoutError, ConnectionError))):
        return TransientStoreError(f"Cannot {verb} {where}: {why}.")
    return StoreError(f"Cannot {verb} {where}: {why} (errno {number}).")
