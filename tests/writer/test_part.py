"""One part, written while its snapshot is taken: digests beside the writes, and an end of all threads when one fails.

Seen to fail with digests that do not wait for the snapshot, and without the abort when a write has failed.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from typing import Any

import pytest

from spot_core.digest import CHUNK_SIZE, chunk_digest, tree_digest
from spot_core.errors import SaveError, StoreError
from spot_core.parts import PartIndex
from spot_core.store import MemoryStore
from spot_core.testing.stores import FailingStore
from spot_core.writer.gate import Gate
from spot_core.writer.job import Bases, WriteJob, encode_index
from spot_core.writer.part import Landed, write_staged_part
from spot_core.writer.slab import Slab

from ._snapshot import target

WAIT = 60
KEYS = {"rank": 0, "blob_key": target(1).blob_key, "index_key": target(1).index_key}


@pytest.fixture
def slab() -> Iterator[Slab]:
    slab = Slab.create(6 * CHUNK_SIZE)
    yield slab
    slab.close()


class Beside(ThreadPoolExecutor):
    """Keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(1)
        self.asked = threading.Event()
        self.future: Future[Any]

    def submit(self, *args: Any, **kwargs: Any) -> Future[Any]:
        self.future = super().submit(*args, **kwargs)
        self.asked.set()
        return self.future


@pytest.fixture
def beside() -> Iterator[Beside]:
    with Beside() as pool:
        yield pool


@pytest.mark.parametrize("size", [1, CHUNK_SIZE, CHUNK_SIZE + 1, 6 * CHUNK_SIZE - 5])
def test_digests_are_those_of_the_whole_snapshot(slab: Slab, beside: Beside, size: int) -> None:
    """The memory holds another snapshot when the write begins, and this one chunk by chunk."""
    slab.data[:] = b"\xff" * len(slab.data)
    store, gate, data = MemoryStore(), Gate(slab), os.urandom(size)
    with ThreadPoolExecutor(1) as pool:
        job = {**KEYS, "size": size, "index": gate.wait_described, "beside": beside}
        writing = pool.submit(write_staged_part, store, gate, **job)
        gate.describe(lambda: encode_index(WriteJob(0, target(1), size, {})))
        asked = beside.asked.wait(WAIT)
        early = wait([beside.future], timeout=0.2).done
        for start in range(0, size, CHUNK_SIZE):
            end = min(start + CHUNK_SIZE, size)
            slab.data[start:end] = data[start:end]
            slab.watermark = end
            gate.ring()
        part = writing.result(WAIT).part
    assert asked
    assert not early, "digests of what was not there yet"
    expected = [chunk_digest(data[start : start + CHUNK_SIZE]) for start in range(0, size, CHUNK_SIZE)]
    assert store.get(KEYS["blob_key"]) == data
    assert part.blob is not None
    assert part.blob.digest == tree_digest(expected)
    assert PartIndex.read(store, part).digests == tuple(expected)


def test_a_write_that_fails_waits_for_no_more_of_the_snapshot(slab: Slab, beside: Executor) -> None:
    """Half of it is there, and the rest never comes."""
    slab.watermark = CHUNK_SIZE
    store = FailingStore(MemoryStore(), lambda _, verb, __: StoreError("no room") if verb == "put_blob" else None)
    job = {**KEYS, "size": 2 * CHUNK_SIZE, "index": lambda: b"{}", "beside": beside}
    with pytest.raises(StoreError, match="no room"):
        _in_time(lambda: write_staged_part(store, Gate(slab), **job))
    assert not list(store.inner.list(""))


def test_an_index_that_cannot_be_had_fails_the_write(slab: Slab, beside: Executor) -> None:
    def broken() -> bytes:
        raise ValueError("not JSON")

    slab.watermark, store = CHUNK_SIZE, MemoryStore()
    job = {**KEYS, "size": CHUNK_SIZE, "index": broken, "beside": beside}
    with pytest.raises(ValueError, match="not JSON"):
        _in_time(lambda: write_staged_part(store, Gate(slab), **job))
    assert [info.key for info in store.list("")] == [KEYS["blob_key"]]


def test_after_an_abort_nobody_goes_on_with_what_is_there_already(slab: Slab) -> None:
    slab.watermark, gate = CHUNK_SIZE, Gate(slab)
    gate.settle(Bases())
    gate.describe(lambda: b"{}")
    gate.abort("the copy failed")
    for waiting in (lambda: gate.wait_for(1), gate.wait_settled, gate.wait_described):
        with pytest.raises(SaveError, match="the copy failed"):
            waiting()


def _in_time(write: Callable[[], Landed]) -> Landed:
    """A thread that waits for ever is an error of the test, not its end."""
    ended: list[Landed | BaseException] = []

    def run() -> None:
        try:
            ended.append(write())
        except BaseException as error:
            ended.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(WAIT)
    assert ended, "it still waits"
    if isinstance(ended[0], BaseException):
        raise ended[0]
    return ended[0]
