"""What the trainer hands to the writer: one rank's part of one save, and what the writer adds to its index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from spot_core.digest import CHUNKS_KEY, chunks_entry
from spot_core.manifest import FORMAT


class Target(Protocol):
    """The keys a part is written to, both new (`PartTarget` of an open generation)."""

    @property
    def blob_key(self) -> str: ...

    @property
    def index_key(self) -> str: ...


class RawJson:
    """A value of an index that does not change between saves: encoded once, by the first thread that asks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make()` is the value."""
        self._make = make

    @cached_property
    def text(self) -> bytes:
        return _dumps(self._make())


@dataclass(frozen=True)
class WriteJob:
    """Write `size` bytes of the slab as the blob, then `index` with the blob's chunk digests beside it.

    With `size` 0 there is no blob. `index` holds JSON values, or `RawJson` at its top level. Format and rank are put
    before it (see `spot_core.parts`); its key "chunks" is the writer's.
    """

    rank: int
    target: Target
    size: int
    index: Mapping[str, Any]
    local: bool = False
    """Write it to the local tier; to the durable store otherwise."""
    spare: tuple[str, ...] = ()
    """For the local tier: names of the generations that have to stay there (see `LocalTier.make_room`),"""
    extra: tuple[str, ...] = ()
    """and of those that may, while there is room."""


def fields_of(job: WriteJob) -> dict[str, Any]:
    """All of a job but its index, as JSON values."""
    return {
        "rank": job.rank,
        "blob_key": job.target.blob_key,
        "index_key": job.target.index_key,
        "size": job.size,
        "local": job.local,
        "spare": list(job.spare),
        "extra": list(job.extra),
    }


def encode_index(job: WriteJob) -> bytes:
    """The job's index as UTF-8 JSON, encoded entry by entry, so that no single call holds the GIL for all of it."""
    if CHUNKS_KEY in job.index:
        raise ValueError(f"an index must not bring its own {CHUNKS_KEY!r} entry: the writer adds it")
    index = {"format": FORMAT, "rank": job.rank, **job.index}
    entries = [
        json.dumps(key).encode() + b":" + (value.text if isinstance(value, RawJson) else _dumps(value))
        for key, value in index.items()
    ]
    return b"{" + b",".join(entries) + b"}"


def finish_index(index: bytes, chunk_digests: list[bytes]) -> bytes:
    """Add the chunk digests to an encoded index without parsing it."""
    return index[:-1] + b"," + _dumps(CHUNKS_KEY) + b":" + _dumps(chunks_entry(chunk_digests)) + b"}"


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
