"""Write one part: follow the slab's watermark, store the blob, then the index. The same in both modes.

The digests are taken beside the writes, not on the way: a disk or a connection that could have bytes waits for nothing.
Once they are known the index is made ready while the last bytes are on their way. It is stored after them: in one
order, so that a test can kill at the same point again.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, wait
from dataclasses import dataclass

from spot_core import layout
from spot_core.digest import CHUNK_SIZE, bytes_digest, chunk_digest, tree_digest
from spot_core.manifest import ObjectRef, Part
from spot_core.store import Store, put_once
from spot_core.writer.gate import Gate
from spot_core.writer.job import Bases, base_entry, chunks_text, finish_index
from spot_core.writer.meter import Metered, Tell, Throttle
from spot_core.writer.slab import round_up


@dataclass(frozen=True)
class Landed:
    """A part that was written, and the chunk digests of the base blob that was written with it."""

    part: Part
    base_digests: tuple[bytes, ...] = ()


class SlabSource:
    """The slab as a `BlobSource`: a chunk is available once it is staged.

    `size` bytes from byte `start` on, a multiple of the page size; but for `start` 0 they have to be staged already.
    """

    chunk_size = CHUNK_SIZE

    def __init__(self, gate: Gate, size: int, start: int = 0) -> None:
        self.size = size
        self._start = start
        self._gate = gate

    def chunk(self, i: int) -> memoryview:
        start, end = self._bounds(i)
        self._wait_for(end)
        return self._gate.slab.data[self._start + start : self._start + end]

    def padded_chunk(self, i: int) -> memoryview | None:
        """The chunk to the end of its last page; what follows `size` there is arbitrary."""
        start, end = self._bounds(i)
        self._wait_for(end)
        return self._gate.slab.data[self._start + start : self._start + round_up(end)]

    def digests(self) -> list[bytes]:
        """The digests of all chunks, in order, once all is staged: until then training and copies need the cores, which
        a loop of many small operations feels, and afterwards there is time, since few disks are as fast as a digest."""
        self._wait_for(self.size)
        return [chunk_digest(self.chunk(i)) for i in range(-(-self.size // CHUNK_SIZE))]

    def _wait_for(self, end: int) -> None:
        self._gate.wait_for(0 if self._start else end)

    def _bounds(self, i: int) -> tuple[int, int]:
        return i * CHUNK_SIZE, min((i + 1) * CHUNK_SIZE, self.size)


@dataclass(frozen=True)
class _Described:
    index: bytes
    """Encoded, and whole."""
    digests: list[bytes]
    base_digests: list[bytes]


def write_staged_part(
    store: Store,
    gate: Gate,
    *,
    rank: int,
    blob_key: str,
    index_key: str,
    size: int,
    index: Callable[[], bytes],
    beside: Executor,
    based: bool = False,
    throttle: Throttle | None = None,
    tell: Tell | None = None,
) -> Landed:
    """Store `size` bytes of the slab and, when they are, the encoded index; durable on return. Commits nothing.

    `beside`: takes the digests meanwhile, on one thread that is free.

    `based`: also the base blob, if there is a new one; what else there is of them goes into the index.

    `throttle` bounds the rate, None for a tier that needs no bound; `tell` hears of the progress of a long write.

    Raises StoreError (or OSError) from the store, SaveError when staging failed.
    """

    def put(key: str, source: SlabSource) -> None:
        store.put_blob(key, source if throttle is None else Metered(source, throttle, tell))

    described = beside.submit(_describe, gate, size, index, based)
    try:
        if size:
            put(blob_key, SlabSource(gate, size))
        bases = gate.wait_settled() if based else Bases()
        base_key = layout.base_key(blob_key)
        if bases.size:
            put(base_key, SlabSource(gate, bases.size, bases.start))
    except BaseException as error:
        gate.abort(f"its bytes could not be written ({error})")  # nobody needs the digests any more
        wait([described])
        raise
    known = described.result()
    put_once(store, index_key, known.index)
    blob = ObjectRef(blob_key, size, tree_digest(known.digests)) if size else None
    new = [ObjectRef(base_key, bases.size, tree_digest(known.base_digests))] if bases.size else []
    ref = ObjectRef(key=index_key, size=len(known.index), digest=bytes_digest(known.index))
    return Landed(Part(rank, blob, ref, (*bases.refs, *new)), tuple(known.base_digests))


def _describe(gate: Gate, size: int, index: Callable[[], bytes], based: bool) -> _Described:
    digests = SlabSource(gate, size).digests()
    bases = gate.wait_settled() if based else Bases()
    entries, base_digests = list(bases.entries), list[bytes]()
    if bases.size:
        base_digests = SlabSource(gate, bases.size, bases.start).digests()
        entries.append(base_entry(chunks_text(base_digests), bases.tensors))
    return _Described(finish_index(index(), digests, entries), digests, base_digests)
