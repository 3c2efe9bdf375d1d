"""Bring a part from the local tier to the durable store: read, checked, sent on, a few chunks at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import stamina

from spot_core import layout
from spot_core.digest import chunk_digest
from spot_core.errors import CorruptShardError, KeyExistsError, TransientStoreError
from spot_core.layout import PartTarget
from spot_core.manifest import ObjectRef, Part
from spot_core.parts import BlobIndex, PartIndex
from spot_core.store import Store, put_once
from spot_core.writer.job import Target
from spot_core.writer.meter import Metered, Tell, Throttle

RETRY_S = 600.0
"""How long a drain outlives a store that fails for a while, beyond what the store itself tries: the data is safe."""


@dataclass(frozen=True)
class DrainJob:
    """`part` lies at the local tier; its objects go to the keys of `target` at the durable store, both new."""

    part: Part
    target: Target
    lent: tuple[ObjectRef, ...] = ()
    """Base blobs at the durable store that may be referred to: one that holds just the same is not sent again."""

    def to_json(self) -> dict[str, Any]:
        keys = {"blob_key": self.target.blob_key, "index_key": self.target.index_key}
        return {"part": self.part.to_json(), **keys, "lent": [ref.to_json() for ref in self.lent]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> DrainJob:
        target = PartTarget(blob_key=value["blob_key"], index_key=value["index_key"])
        return cls(Part.from_json(value["part"]), target, tuple(ObjectRef.from_json(ref) for ref in value["lent"]))


def drain_part(
    local: Store,
    durable: Store,
    job: DrainJob,
    throttle: Throttle,
    tell: Tell | None = None,
    *,
    retry_s: float = RETRY_S,
) -> Part:
    """Copy one part; durable on return, every byte that went was the byte that was committed. Commits nothing.

    Raises:
        CorruptShardError, KeyMissingError, FormatError: the local copy is damaged; what was sent is taken back.
        StoreError: either store failed, the durable one for longer than `retry_s`.
    """
    part, target = job.part, job.target
    index = PartIndex.read(local, part)
    text = local.get(part.index.key)
    sources: dict[str, _PartSource] = {}
    if part.blob is not None:
        sources[target.blob_key] = _PartSource(local, part.blob, index)
    bases: list[ObjectRef] = []
    for ref, entry in zip(part.bases, index.bases, strict=True):
        same = next((lent for lent in job.lent if (lent.size, lent.digest) == (ref.size, ref.digest)), None)
        if same is None:  # at the local tier a part has at most one, and refers to none
            same = ObjectRef(layout.base_key(target.blob_key), ref.size, ref.digest)
            sources[same.key] = _PartSource(local, ref, entry)
        bases.append(same)
    for attempt in stamina.retry_context(
        on=TransientStoreError, attempts=None, timeout=retry_s, wait_initial=1.0, wait_max=30.0
    ):
        with attempt:
            for key, source in sources.items():
                if attempt.num > 1:
                    # What a failed upload left under this key is ours, and the same bytes; a store may want it gone.
                    durable.delete(key)
                try:
                    durable.put_blob(key, Metered(source, throttle, tell))
                except KeyExistsError:
                    if attempt.num == 1:
                        raise
            put_once(durable, target.index_key, text)
    blob = None if part.blob is None else ObjectRef(target.blob_key, part.blob.size, part.blob.digest)
    return Part(part.rank, blob, ObjectRef(target.index_key, part.index.size, part.index.digest), tuple(bases))


class _PartSource:
    """A blob of the local tier as a `BlobSource`; a chunk that is not what was committed is not given out."""

    def __init__(self, store: Store, ref: ObjectRef, index: BlobIndex) -> None:
        self._store = store
        self._ref = ref
        self._index = index
        self.size = ref.size
        self.chunk_size = index.chunk_size

    def chunk(self, i: int) -> memoryview:
        at = i * self.chunk_size
        data = bytearray(min(self.chunk_size, self.size - at))
        self._store.get_ranges(self._ref.key, [(at, [memoryview(data)])], threads=1)
        if chunk_digest(data) != self._index.digests[i]:
            raise CorruptShardError(
                f"Bytes {at} to {at + len(data)} of {self._ref.key} at {self._store.uri} are not those that were "
                "committed: the local copy is damaged and goes nowhere."
            )
        return memoryview(data)

    def padded_chunk(self, i: int) -> memoryview | None:
        return None
