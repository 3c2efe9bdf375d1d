"""Where a run's objects live: one interface, four backends.

`open_store` picks the backend from the URI: a path or ``file://`` is a `LocalStore`, ``memory://`` a `MemoryStore`,
S3 and Azure a `CloudStore`, anything else, such as GCS, an `FsspecStore`. A store of one's own is tested with
`spot_core.testing.StoreContract`.
"""

from __future__ import annotations

from spot_core.store._base import (
    BlobSource,
    BytesSource,
    Capabilities,
    ObjectInfo,
    Store,
    Unfinished,
    check_key,
    check_prefix,
    chunk_count,
    is_reopenable,
)
from spot_core.store._cloud import CloudStore
from spot_core.store._fsspec import FsspecStore
from spot_core.store._local import LocalStore
from spot_core.store._memory import MemoryStore
from spot_core.store._open import open_store
from spot_core.store._readback import put_once

__all__ = [
    "BlobSource",
    "BytesSource",
    "Capabilities",
    "CloudStore",
    "FsspecStore",
    "LocalStore",
    "MemoryStore",
    "ObjectInfo",
    "Store",
    "Unfinished",
    "check_key",
    "check_prefix",
    "chunk_count",
    "is_reopenable",
    "open_store",
    "put_once",
]
