"""Verification: is a committed generation whole? By depth, since reading everything costs a restore."""

from __future__ import annotations

import enum
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from spot_core.digest import chunk_digest
from spot_core.errors import CorruptShardError, KeyMissingError, Reason, StoreError, TornGenerationError
from spot_core.generation import Committed
from spot_core.manifest import ObjectRef, Part
from spot_core.parts import BlobIndex, PartIndex
from spot_core.store import Store

__all__ = ["Depth", "Verified", "verify"]


class Depth(str, enum.Enum):
    """How deep to look; each includes the ones before."""

    MARKER = "marker"
    """The marker is there and readable: no further I/O."""
    SIZES = "sizes"
    """Every object is there, with its size: one request each."""
    DIGESTS = "digests"
    """Every byte is what was committed: reads everything."""


@dataclass(frozen=True)
class Verified:
    """A generation that was looked at to `depth`. Made by `verify` only."""

    committed: Committed
    depth: Depth
    store: Store = field(repr=False, compare=False)
    _indexes: dict[int, PartIndex] = field(default_factory=dict, init=False, repr=False, compare=False)

    def names(self, rank: int = 0) -> list[str]:
        """Sorted names of the byte objects that `rank` wrote by `Open.write`."""
        index = self._index(rank)[1]
        return sorted(name for blob in (index, *index.bases) for name in blob.objects)

    def read(self, name: str, rank: int = 0) -> bytes:
        """The bytes that `rank` wrote under `name`, their digests checked on the way.

        Raises:
            KeyError: that rank wrote nothing under that name.
            CorruptShardError, TornGenerationError: damaged: take the next older generation.
            StoreError: the store failed.
        """
        part, whole = self._index(rank)
        blobs = [(part.blob, whole), *zip(part.bases, whole.bases, strict=True)]
        ref, index = next((found for found in blobs if name in found[1].objects), blobs[0])
        at, size = index.objects[name]
        if ref is None or size == 0:
            return b""
        first = at // index.chunk_size
        last = (at + size - 1) // index.chunk_size
        data = b"".join(_checked_chunk(self.store, self.committed, ref, index, i) for i in range(first, last + 1))
        start = at - first * index.chunk_size
        return data[start : start + size]

    def _index(self, rank: int) -> tuple[Part, PartIndex]:
        for part in self.committed.manifest.parts:
            if part.rank == rank:
                if rank not in self._indexes:
                    self._indexes[rank] = _index(self.store, self.committed, part)
                return part, self._indexes[rank]
        raise KeyError(f"generation {self.committed.id} has no part of rank {rank}")


def verify(store: Store, committed: Committed, depth: Depth, *, threads: int = 4) -> Verified:
    """Look at every object of a generation to `depth`.

    Raises:
        TornGenerationError: an object is missing or has another size.
        CorruptShardError: an object's bytes are not those that were committed.
        FormatError: an index cannot be read by this release.
        StoreError: the store failed; nothing is known.
    """
    if depth is not Depth.MARKER:
        with ThreadPoolExecutor(threads, thread_name_prefix="spot-verify") as pool:
            # Results are taken in order: the first damage reported is the same every time.
            for _ in pool.map(lambda ref: _check_size(store, committed, ref), committed.manifest.objects):
                pass
            if depth is Depth.DIGESTS:
                # `not`: the result is dropped at once, or what was read would pile up in the futures.
                for _ in pool.map(lambda job: not _checked_chunk(store, committed, *job), _chunks(store, committed)):
                    pass
    return Verified(committed, depth, store)


def _check_size(store: Store, committed: Committed, ref: ObjectRef) -> None:
    info = store.stat(ref.key)
    if info is None:
        raise _missing(store, committed, ref)
    if info.size != ref.size:
        raise TornGenerationError(
            f"Generation {committed.id} at {store.uri} is torn: {ref.key} has {info.size} bytes, not {ref.size}."
        )


def _chunks(store: Store, committed: Committed) -> Iterator[tuple[ObjectRef, BlobIndex, int]]:
    seen = set[str]()  # ranks may refer to one and the same blob
    for part in committed.manifest.parts:
        index = _index(store, committed, part)
        for ref, blob in [(part.blob, index), *zip(part.bases, index.bases, strict=True)]:
            if ref is not None and ref.key not in seen:
                seen.add(ref.key)
                for i in range(len(blob.digests)):
                    yield ref, blob, i


def _index(store: Store, committed: Committed, part: Part) -> PartIndex:
    try:
        return PartIndex.read(store, part)
    except KeyMissingError as error:
        raise _missing(store, committed, part.index) from error


def _checked_chunk(store: Store, committed: Committed, ref: ObjectRef, index: BlobIndex, i: int) -> bytearray:
    at = i * index.chunk_size
    data = bytearray(min(index.chunk_size, ref.size - at))
    try:
        store.get_ranges(ref.key, [(at, [memoryview(data)])], threads=1)
    except KeyMissingError as error:
        raise _missing(store, committed, ref) from error
    except StoreError as error:
        if error.reason is not Reason.TRUNCATED:
            raise
        raise TornGenerationError(f"Generation {committed.id} at {store.uri} is torn: {error}") from error
    if chunk_digest(data) != index.digests[i]:
        raise CorruptShardError(
            f"Generation {committed.id} at {store.uri} is corrupt: bytes {at} to {at + len(data)} of {ref.key} are not "
            "those that were written."
        )
    return data


def _missing(store: Store, committed: Committed, ref: ObjectRef) -> TornGenerationError:
    return TornGenerationError(f"Generation {committed.id} at {store.uri} is torn: {ref.key} is missing.")
