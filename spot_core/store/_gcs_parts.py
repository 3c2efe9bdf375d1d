"""Big objects on GCS, several parts at a time.

An upload to GCS is one stream, each block of it sent after the one before was answered, so that its speed is that of a
single connection. Parts are objects of their own, beside the one that they make: streamed side by side, joined by one
request that copies nothing (compose, of up to 32), and deleted. What a writer leaves that dies before is in its
generation's folder and goes with that.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from spot_core.errors import SaveError
from spot_core.store._base import BlobSource, chunk_count

__all__ = ["BLOCK", "Slice", "side_by_side", "slices"]

BLOCK = 8 << 20
"""Bytes of a part that are sent at a time."""
_PART, _MOST = 64 << 20, 32
"""Bytes per part at least, and how many parts can be joined at once."""
_AT_ONCE = 6


class Slice:
    """Some neighbouring chunks of a source, as a source."""

    def __init__(self, source: BlobSource, first: int, chunks: int, failed: threading.Event) -> None:
        self.chunk_size = source.chunk_size
        self.size = min(chunks * self.chunk_size, source.size - first * self.chunk_size)
        self._source, self._first, self._failed = source, first, failed

    def chunk(self, i: int) -> memoryview:
        if self._failed.is_set():
            raise SaveError("another part of the object failed")
        return self._source.chunk(self._first + i)

    def padded_chunk(self, i: int) -> memoryview | None:
        return None


def slices(source: BlobSource, failed: threading.Event) -> list[Slice]:
    """`source` in up to 32 parts, in order; one, or none, when it is not worth it."""
    count = chunk_count(source)
    least = max(_PART, -(-source.size // _MOST))
    chunks = -(-least // source.chunk_size)
    return [Slice(source, first, min(chunks, count - first), failed) for first in range(0, count, chunks)]


def side_by_side(jobs: Iterable[Callable[[], object]], failed: threading.Event) -> None:
    """Do all of them, some at a time. The first that fails ends the others, by `failed`, and its error is raised."""
    errors: list[BaseException] = []

    def one(job: Callable[[], object]) -> None:
        if failed.is_set():
            return
        try:
            job()
        except BaseException as error:  # noqa: BLE001 - raised below, where it can be told from what it made fail
            errors.append(error)
            failed.set()

    with ThreadPoolExecutor(_AT_ONCE, thread_name_prefix="spot-parts") as pool:
        for _ in pool.map(one, jobs):
            pass
    if errors:
        raise errors[0]
