"""One rank's part of a generation: blobs of raw bytes, and an index that says what is in them.

The index is JSON::

    {"format": 1, "rank": 0,
     "chunks":  {"algorithm": "xxh3_128", "size": <bytes per chunk>, "digests": ["<hex>", ...]},
     "objects": {name: [offset, length]},      named bytes, in bytes from the blob's start
     "tensors": ..., "tree": ...,              owned by spot_core.pytorch
     "features": ["bases"],                    where there are any
     "bases":   [{"chunks": ..., "objects": ..., "tensors": ...}, ...]}

An entry of ``"bases"`` says the same of a *base blob* as the rest says of the part's blob: it holds what is not
expected to change. Where these blobs lie, in this generation or in an older one, stands in the manifest, in the same
order (`Part.bases`). An entry names only what this generation uses of its blob.

Entries of a blob start at multiples of 64 bytes, so that any element type can be viewed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
from spot_core.manifest import BASES, FORMAT, JSON, ObjectRef, Part, decode, encode
from spot_core.store import BytesSource, Store, put_once

__all__ = ["ALIGNMENT", "BlobIndex", "PartIndex", "write_part"]

ALIGNMENT = 64


@dataclass(frozen=True)
class BlobIndex:
    """What the index says of one blob: its chunks, what lies where in it, and the JSON that this was read from."""

    chunk_size: int
    digests: tuple[bytes, ...]
    objects: Mapping[str, tuple[int, int]]
    raw: Mapping[str, Any]


@dataclass(frozen=True)
class PartIndex(BlobIndex):
    """A part's index, checked against the manifest's digest of it."""

    bases: tuple[BlobIndex, ...] = ()
    """Beside `Part.bases`."""

    @classmethod
    def read(cls, store: Store, part: Part) -> PartIndex:
        """Raises CorruptShardError when the bytes are not those committed, KeyMissingError, StoreError, FormatError."""
        data = store.get(part.index.key)
        where = f"{part.index.key} at {store.uri}"
        if len(data) != part.index.size or bytes_digest(data) != part.index.digest:
            raise CorruptShardError(f"The index of rank {part.rank}, {where}, is not what was committed.")
        raw = decode(data, where)
        blob = _blob_index(raw, part.blob, where)
        entries = raw.get(BASES, [])
        if not isinstance(entries, list) or len(entries) != len(part.bases):
            raise FormatError(f"{where} speaks of other base blobs than the marker.")
        bases = [_blob_index(entry, ref, where) for entry, ref in zip(entries, part.bases, strict=True)]
        return cls(blob.chunk_size, blob.digests, blob.objects, raw, tuple(bases))


def _blob_index(raw: Mapping[str, Any], ref: ObjectRef | None, where: str) -> BlobIndex:
    try:
        chunk_size, digests = parse_chunks_entry(raw[CHUNKS_KEY]) if ref is not None else (CHUNK_SIZE, [])
        objects = {str(name): (int(at), int(size)) for name, (at, size) in raw.get("objects", {}).items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where} cannot be read: {error!r}.") from error
    if ref is not None:
        if tree_digest(digests) != ref.digest or len(digests) != -(-ref.size // chunk_size):
            raise CorruptShardError(f"The chunk digests in {where} are not those of {ref.key} that was committed.")
        if any(at < 0 or size < 0 or at + size > ref.size for at, size in objects.values()):
            raise FormatError(f"{where} names bytes beyond the end of {ref.key}.")
    return BlobIndex(chunk_size, tuple(digests), objects, raw)


def write_part(
    store: Store,
    target: PartTarget,
    rank: int,
    objects: Mapping[str, bytes],
    *,
    unchanging: Mapping[str, bytes] | None = None,
    lendable: Iterable[ObjectRef] = (),
) -> Part:
    """Write named bytes as one part, durable on return. The simple way, for callers without `spot_core.writer`.

    `unchanging`: further named bytes, which are written into a blob of their own, unless one of `lendable` holds just
    these bytes: then it is referred to.
    """
    blob = _packed(objects)
    base = _packed(unchanging) if unchanging else None
    index: dict[str, JSON] = {"format": FORMAT, "rank": rank, **blob.entry}
    bases: tuple[ObjectRef, ...] = ()
    if base is not None:
        ref = next((ref for ref in lendable if (ref.size, ref.digest) == (len(base.data), base.digest)), None)
        if ref is None:
            ref = ObjectRef(target.base_key, len(base.data), base.digest)
            store.put_blob(target.base_key, BytesSource(base.data, CHUNK_SIZE))
        bases = (ref,)
        index |= {"features": [BASES], BASES: [base.entry]}
    store.put_blob(target.blob_key, BytesSource(blob.data, CHUNK_SIZE))
    text = encode(index)
    put_once(store, target.index_key, text)
    return Part(
        rank=rank,
        blob=ObjectRef(target.blob_key, len(blob.data), blob.digest),
        index=ObjectRef(target.index_key, len(text), bytes_digest(text)),
        bases=bases,
    )


@dataclass(frozen=True)
class _Packed:
    data: bytes
    digest: str
    entry: dict[str, JSON]


def _packed(objects: Mapping[str, bytes]) -> _Packed:
    blob = bytearray()
    places: dict[str, JSON] = {}
    for name, data in objects.items():
        blob.extend(bytes(-len(blob) % ALIGNMENT))
        places[name] = [len(blob), len(data)]
        blob.extend(data)
    digests = [chunk_digest(blob[at : at + CHUNK_SIZE]) for at in range(0, len(blob), CHUNK_SIZE)]
    entry: dict[str, JSON] = {CHUNKS_KEY: _json(chunks_entry(digests)), "objects": places}
    return _Packed(bytes(blob), tree_digest(digests), entry)


def _json(value: dict[str, Any]) -> JSON:
    return value
