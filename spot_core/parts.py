"""One rank's part of a generation: a blob of raw bytes, and an index that says what is in it.

The index is JSON::

    {"format": 1, "rank": 0,
     "chunks":  {"algorithm": "xxh3_128", "size": <bytes per chunk>, "digests": ["<hex>", ...]},
     "objects": {name: [offset, length]},      named bytes, in bytes from the blob's start
     "tensors": ..., "tree": ...}              owned by spot_core.pytorch

Entries of a blob start at multiples of 64 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spot_core.digest import (
    CHUNK_SIZE,
    CHUNKS_KEY,
    bytes_digest,
    chunk_digest,
    chunks_entry,
    parse_chunks_entry,
    tree_digest,
)
from spot_core.errors import CorruptShardError, FormatError
from spot_core.layout import PartTarget
from spot_core.manifest import FORMAT, JSON, ObjectRef, Part, decode, encode
from spot_core.store import BytesSource, Store, put_once

__all__ = ["ALIGNMENT", "PartIndex", "write_part"]

ALIGNMENT = 64


@dataclass(frozen=True)
class PartIndex:
    """A part's index, checked against the manifest's digest of it."""

    chunk_size: int
    digests: tuple[bytes, ...]
    objects: Mapping[str, tuple[int, int]]
    raw: Mapping[str, Any]

    @classmethod
    def read(cls, store: Store, part: Part) -> PartIndex:
        """Raises CorruptShardError when the bytes are not those committed, KeyMissingError, StoreError, FormatError."""
        data = store.get(part.index.key)
        where = f"{part.index.key} at {store.uri}"
        if len(data) != part.index.size or bytes_digest(data) != part.index.digest:
            raise CorruptShardError(f"The index of rank {part.rank}, {where}, is not what was committed.")
        raw = decode(data, where)
        try:
            chunk_size, digests = parse_chunks_entry(raw[CHUNKS_KEY]) if part.blob else (CHUNK_SIZE, [])
            objects = {str(name): (int(at), int(size)) for name, (at, size) in raw.get("objects", {}).items()}
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{where} cannot be read: {error!r}.") from error
        if part.blob is not None:
            if tree_digest(digests) != part.blob.digest or len(digests) != -(-part.blob.size // chunk_size):
                raise CorruptShardError(f"The chunk digests in {where} are not those of the blob that was committed.")
            if any(at < 0 or size < 0 or at + size > part.blob.size for at, size in objects.values()):
                raise FormatError(f"{where} names bytes beyond the end of {part.blob.key}.")
        return cls(chunk_size=chunk_size, digests=tuple(digests), objects=objects, raw=raw)


def write_part(store: Store, target: PartTarget, rank: int, objects: Mapping[str, bytes]) -> Part:
    """Write named bytes as one part, durable on return. The simple way, for callers without `spot_core.writer`."""
    blob = bytearray()
    places: dict[str, JSON] = {}
    for name, data in objects.items():
        blob.extend(bytes(-len(blob) % ALIGNMENT))
        places[name] = [len(blob), len(data)]
        blob.extend(data)
    source = BytesSource(bytes(blob), CHUNK_SIZE)
    digests = [chunk_digest(blob[at : at + CHUNK_SIZE]) for at in range(0, len(blob), CHUNK_SIZE)]
    index = encode({"format": FORMAT, "rank": rank, CHUNKS_KEY: _json(chunks_entry(digests)), "objects": places})
    store.put_blob(target.blob_key, source)
    put_once(store, target.index_key, index)
    return Part(
        rank=rank,
        blob=ObjectRef(target.blob_key, len(blob), tree_digest(digests)),
        index=ObjectRef(target.index_key, len(index), bytes_digest(index)),
    )


def _json(value: dict[str, Any]) -> JSON:
    return value
