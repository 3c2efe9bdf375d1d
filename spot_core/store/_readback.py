"""Conditional puts whose reply may be lost.

A request may be carried out and its reply lost; a client library that repeats it then reports a conflict with the
caller's own object. Two rules settle it:

1. success may be reported only when the key is seen to hold the caller's bytes (they carry a nonce, so equal bytes
   are one's own);
2. "somebody else has it" may be reported only when the key is seen to hold other bytes.

Anything else is an unknown outcome: the original error is raised, and the caller must act as if the object may
appear later.
"""

from __future__ import annotations

import logging

from spot_core.errors import KeyExistsError, KeyMissingError, StoreError
from spot_core.store._base import Store

__all__ = ["put_once"]

_log = logging.getLogger(__name__)


def put_once(store: Store, key: str, data: bytes) -> None:
    """`Store.put_if_absent` with a lost reply read back. `data` must carry a nonce, or mean the same whoever wrote it.

    Raises:
        KeyExistsError: the key holds other bytes.
        StoreError: the outcome is unknown: the object is absent now, or could not be read.
    """
    try:
        store.put_if_absent(key, data)
    except StoreError as error:
        try:
            found = store.get(key)
        except KeyMissingError:
            raise error from None
        except StoreError as second:
            raise error from second
        if found != data:
            if isinstance(error, KeyExistsError):
                raise
            raise KeyExistsError(f"{key} at {store.uri} was taken by another writer.") from error
        _log.info("The reply for %s was lost; read back, the object is there and is ours.", key)
