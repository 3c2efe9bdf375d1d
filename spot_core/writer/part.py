"""Write one part: follow the slab's watermark, digest, store the blob, then the index. The same in both modes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from spot_core import layout
from spot_core.digest import CHUNK_SIZE, bytes_digest, chunk_digest, tree_digest
from spot_core.errors import SaveError
from spot_core.manifest import ObjectRef, Part
from spot_core.store import Store, put_once
from spot_core.writer.job import Bases, base_entry, chunks_text, finish_index
from spot_core.writer.meter import Metered, Tell, Throttle
from spot_core.writer.slab import Slab, round_up


@dataclass(frozen=True)
class Landed:
    """A part that was written, and the chunk digests of the base blob that was written with it."""

    part: Part
    base_digests: tuple[bytes, ...] = ()


class Gate:
    """Lets threads wait for the watermark without polling: `ring` after it moved, `abort` when it never will; for what
    base blobs the part has, which `settle` tells; and for its index, which `describe` brings."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        self._moved = threading.Condition()
        self._failure: str | None = None
        self._bases: Bases | None = None
        self._index: bytes | None = None

    def settle(self, bases: Bases) -> None:
        with self._moved:
            self._bases = bases
            self._moved.notify_all()

    def wait_settled(self) -> Bases:
        """Block until that is known, and the new base blob staged; SaveError when staging failed."""
        with self._moved:
            self._moved.wait_for(lambda: self._failure is not None or self._bases is not None)
            if self._bases is None:
                raise SaveError(f"the snapshot could not be taken: {self._failure}")
            return self._bases

    def describe(self, index: bytes) -> None:
        with self._moved:
            self._index = index
            self._moved.notify_all()

    def wait_described(self) -> bytes:
        """Block until the index is there; SaveError when it never will be."""
        with self._moved:
            self._moved.wait_for(lambda: self._failure is not None or self._index is not None)
            if self._index is None:
                raise SaveError(f"the snapshot could not be taken: {self._failure}")
            return self._index

    def ring(self) -> None:
        with self._moved:
            self._moved.notify_all()

    def abort(self, why: str) -> None:
        with self._moved:
            self._failure = why
            self._moved.notify_all()

    def wait_for(self, nbytes: int) -> None:
        """Block until `nbytes` are staged; SaveError when staging failed."""
        if self.slab.watermark >= nbytes:
            return
        with self._moved:
            self._moved.wait_for(lambda: self._failure is not None or self.slab.watermark >= nbytes)
            if self._failure is not None:
                raise SaveError(f"the snapshot could not be taken: {self._failure}")


class SlabSource:
    """The slab as a `BlobSource`: a chunk is available once it is staged, and is digested on the way out.

    `size` bytes from byte `start` on, a multiple of the page size; but for `start` 0 they have to be staged already.
    """

    chunk_size = CHUNK_SIZE

    def __init__(self, gate: Gate, size: int, start: int = 0) -> None:
        self.size = size
        self._start = start
        self._gate = gate
        self._digests: list[bytes | None] = [None] * -(-size // CHUNK_SIZE)

    def chunk(self, i: int) -> memoryview:
        start, end = self._bounds(i)
        if not self._start:
            self._gate.wait_for(end)
        view = self._gate.slab.data[self._start + start : self._start + end]
        if self._digests[i] is None:
            self._digests[i] = chunk_digest(view)
        return view

    def padded_chunk(self, i: int) -> memoryview | None:
        """The chunk to the end of its last page; what follows `size` there is arbitrary."""
        self.chunk(i)
        start, end = self._bounds(i)
        return self._gate.slab.data[self._start + start : self._start + round_up(end)]

    def digests(self) -> list[bytes]:
        """The digests of all chunks, in order."""
        return [digest if digest is not None else chunk_digest(self.chunk(i)) for i, digest in enumerate(self._digests)]

    def _bounds(self, i: int) -> tuple[int, int]:
        return i * CHUNK_SIZE, min((i + 1) * CHUNK_SIZE, self.size)


def write_staged_part(
    store: Store,
    gate: Gate,
    *,
    rank: int,
    blob_key: str,
    index_key: str,
    size: int,
    index: Callable[[], bytes],
    based: bool = False,
    throttle: Throttle | None = None,
    tell: Tell | None = None,
) -> Landed:
    """Store `size` bytes of the slab and, asked for last, the encoded index; durable on return. Commits nothing.

    `based`: also the base blob, if there is a new one; what else there is of them goes into the index.

    `throttle` bounds the rate, None for a tier that needs no bound; `tell` hears of the progress of a long write.

    Raises StoreError (or OSError) from the store, SaveError when staging failed.
    """
    blob, digests = None, []
    if size:
        source = SlabSource(gate, size)
        store.put_blob(blob_key, source if throttle is None else Metered(source, throttle, tell))
        digests = source.digests()
        blob = ObjectRef(key=blob_key, size=size, digest=tree_digest(digests))
    bases = gate.wait_settled() if based else Bases()
    refs, entries, base_digests = list(bases.refs), list(bases.entries), list[bytes]()
    if bases.size:
        source, key = SlabSource(gate, bases.size, bases.start), layout.base_key(blob_key)
        store.put_blob(key, source if throttle is None else Metered(source, throttle, tell))
        base_digests = source.digests()
        refs.append(ObjectRef(key=key, size=bases.size, digest=tree_digest(base_digests)))
        entries.append(base_entry(chunks_text(base_digests), bases.tensors))
    text = finish_index(index(), digests, entries)
    put_once(store, index_key, text)
    ref = ObjectRef(key=index_key, size=len(text), digest=bytes_digest(text))
    return Landed(Part(rank=rank, blob=blob, index=ref, bases=tuple(refs)), tuple(base_digests))
