"""The store interface: some verbs over keys, and what each promises.

A store holds write-once objects under keys: relative paths of plain segments, parted by ``/``. No verb
renames. Two keys never name one object. Every verb raises `StoreError` (or a subclass) for whatever the
environment does, never the backend's own exception.

What the protocol of `PROTOCOL.md` leans on:

- a conditional put has one winner;
- a put is durable when it returns;
- an absence that a listing shows proves nothing (listings may be stale), a `KeyMissingError` from `get` or a
  None from `stat` does (read after write by key);
- an error is never reported as an absence.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from spot_core.errors import ConfigError

__all__ = [
    "BlobSource",
    "BytesSource",
    "Capabilities",
    "ObjectInfo",
    "Store",
    "Unfinished",
    "check_key",
    "check_prefix",
    "chunk_count",
    "is_reopenable",
]

_SEGMENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._=+-]{0,200}|\.tmp-[0-9a-f]{1,64}")


@dataclass(frozen=True)
class ObjectInfo:
    key: str
    size: int
    """Bytes."""
    modified: float | None
    """Unix seconds, where the store tells."""


@dataclass(frozen=True)
class Capabilities:
    put_if_absent: bool
    """True when of several writers that race for a key exactly one wins."""
    reopenable: bool
    """True when another process that opens the same URI sees the same objects (not so for memory://)."""


@dataclass(frozen=True)
class Unfinished:
    """An upload that was begun and neither completed nor aborted: no reader sees it, but it is stored, and paid for."""

    key: str
    id: str
    """The store's own name of this upload; several may be under way to one key."""


class BlobSource(Protocol):
    """Where a big object's bytes come from: chunks 0 .. ceil(size / chunk_size) - 1, all but the last full."""

    @property
    def size(self) -> int:
        """Bytes in all; may be 0."""

    @property
    def chunk_size(self) -> int:
        """Bytes per chunk, a multiple of 4096."""

    def chunk(self, i: int) -> memoryview:
        """The bytes of chunk `i`, exact length. Blocks until they are there; thread safe.

        The memory stays valid, and unchanged, until `put_blob` returns.
        """

    def padded_chunk(self, i: int) -> memoryview | None:
        """As `chunk`, in page-aligned memory, rounded up to a multiple of 4096 (for O_DIRECT); None if unavailable."""


class BytesSource:
    """A `BlobSource` over bytes that are already in memory."""

    def __init__(self, data: bytes | bytearray | memoryview, chunk_size: int = 8 << 20) -> None:
        if chunk_size <= 0 or chunk_size % 4096:
            raise ValueError(f"chunk_size must be a positive multiple of 4096, not {chunk_size}")
        self._data = memoryview(data).cast("B")
        self.chunk_size = chunk_size

    @property
    def size(self) -> int:
        return len(self._data)

    def chunk(self, i: int) -> memoryview:
        return self._data[i * self.chunk_size : (i + 1) * self.chunk_size]

    def padded_chunk(self, i: int) -> memoryview | None:
        return None


class Store(Protocol):
    """One run's folder or prefix. Instances are thread safe; opening one has no effect."""

    @property
    def uri(self) -> str:
        """Opens the same store again (where `capabilities.reopenable`); carries no password."""

    @property
    def storage_options(self) -> Mapping[str, Any]:
        """Passed to the backend untouched. May hold secrets: never logged, printed or put into an error."""

    @property
    def capabilities(self) -> Capabilities:
        """What this store can do. The first look may write and remove one probe object, so only a writer looks."""

    def put_if_absent(self, key: str, data: bytes) -> None:
        """Create a small object, whole and durable, unless the key is taken.

        ==================  ==========================  =======================================
        before the call     the reply arrives           the reply is lost
        ==================  ==========================  =======================================
        absent              created                     StoreError; the object may exist
        holds `data`        KeyExistsError              KeyExistsError or StoreError
        holds other bytes   KeyExistsError, unchanged   KeyExistsError or StoreError, unchanged
        ==================  ==========================  =======================================

        A `KeyExistsError` may mean the caller's own earlier attempt (a client library repeats a request whose
        reply was lost). `spot_core.store.put_once` settles that by reading back: use it, not this.

        Raises: KeyExistsError, AccessError, TransientStoreError, StoreError.
        """

    def put(self, key: str, data: bytes) -> None:
        """Create or replace a small object: readers see the old bytes or the new ones. Only for the pointer."""

    def put_blob(self, key: str, source: BlobSource) -> None:
        """Write a big object once, durable on return.

        When it raises, the key may hold nothing or, on stores that cannot do better, part of the bytes; it never
        replaces an object that was there.

        ============  =====================================
        before        result
        ============  =====================================
        absent        created
        present       KeyExistsError where the store can tell
                      at no cost, else undefined: every
                      attempt uses a key of its own
        ============  =====================================
        """

    def get(self, key: str) -> bytes:
        """The whole object. Raises KeyMissingError when there is none."""

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        """Fill buffers from one object. Each range is an offset in bytes and the buffers to fill contiguously from it.

        Raises KeyMissingError, or StoreError with reason TRUNCATED when the object ends before a range does.
        """

    def stat(self, key: str) -> ObjectInfo | None:
        """Size of an object, None when there is none. An error is raised, never told as None."""

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        """Objects below `prefix` ("" or ending in "/"), sorted by key; without `recursive` only those directly below.

        A fresh listing: no cache of this process answers. Empty when there is nothing; an error is raised, never told
        as emptiness.
        """

    def list_dirs(self, prefix: str) -> Sequence[str]:
        """Sorted names of the "directories" directly below `prefix`. On a file system these include empty ones."""

    def delete(self, key: str) -> None:
        """Remove an object; no error when there is none."""

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        """Uploads below `prefix` that are under way, or were left by a writer that died.

        Empty where a store has no such thing, or clears them away by itself and does not tell (GCS and Azure, after a
        week). Raises AccessError where this identity may not look.
        """

    def abort(self, upload: Unfinished) -> None:
        """End an upload and free its parts; no error when it is gone. A writer still at it fails."""


def is_reopenable(store: Store) -> bool:
    """`Capabilities.reopenable`, without the probe that a look at the capabilities may take: stores that would need one
    have it as an attribute of their own too."""
    known: bool | None = getattr(store, "reopenable", None)
    return store.capabilities.reopenable if known is None else known


def chunk_count(source: BlobSource) -> int:
    """How many chunks `source` has: 0 for an empty one."""
    return -(-source.size // source.chunk_size)


def check_key(key: str) -> str:
    """Returns `key`. Raises ConfigError for one that is absolute, climbs out of the store or has odd characters."""
    if not all(_SEGMENT.fullmatch(segment) for segment in key.split("/")):
        raise ConfigError(f"Not an object key: {key!r}. A key is plain names parted by '/', below the run's root.")
    return key


def check_prefix(prefix: str) -> str:
    """Returns `prefix`. Raises ConfigError unless it is empty or a key with "/" at its end."""
    if prefix:
        if not prefix.endswith("/"):
            raise ConfigError(f"A prefix is empty or ends in '/': {prefix!r}.")
        check_key(prefix[:-1])
    return prefix
