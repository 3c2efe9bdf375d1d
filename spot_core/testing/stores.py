"""Stores that misbehave on purpose, around one that does not: faults are injected at the store's boundary, so that the
code under test needs no hook.

Every wrapper keeps `operations`, the (verb, key) pairs in the order they began; a fault names its place by index.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, TypeVar

from spot_core.errors import TransientStoreError
from spot_core.store import BlobSource, Capabilities, ObjectInfo, Store, Unfinished

__all__ = [
    "CRASH_MODES",
    "CrashingStore",
    "FailingStore",
    "LostReplyStore",
    "SimulatedCrash",
    "SlowStore",
    "StoreWrapper",
    "TornSource",
]

_T = TypeVar("_T")

CRASH_MODES = ("before", "after", "torn")


class SimulatedCrash(BaseException):
    """The process died here. Not an `Exception`: no handler of the code under test may survive its own death."""


class StoreWrapper:
    """Passes every verb on. Subclasses override `around`."""

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.operations: list[tuple[str, str]] = []
        self._lock = threading.Lock()

    def around(self, index: int, verb: str, key: str, action: Callable[[], _T]) -> _T:
        """Do operation number `index`, or not."""
        return action()

    @property
    def uri(self) -> str:
        return self.inner.uri

    @property
    def storage_options(self) -> Mapping[str, Any]:
        return self.inner.storage_options

    @property
    def capabilities(self) -> Capabilities:
        # Another process would open the store without the wrapper.
        return Capabilities(put_if_absent=self.inner.capabilities.put_if_absent, reopenable=False)

    def put_if_absent(self, key: str, data: bytes) -> None:
        self._do("put_if_absent", key, lambda: self.inner.put_if_absent(key, data))

    def put(self, key: str, data: bytes) -> None:
        self._do("put", key, lambda: self.inner.put(key, data))

    def put_blob(self, key: str, source: BlobSource) -> None:
        self._do("put_blob", key, lambda: self.inner.put_blob(key, self.source(len(self.operations) - 1, source)))

    def source(self, index: int, source: BlobSource) -> BlobSource:
        return source

    def get(self, key: str) -> bytes:
        return self._do("get", key, lambda: self.inner.get(key))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        self._do("get_ranges", key, lambda: self.inner.get_ranges(key, ranges, threads=threads))

    def stat(self, key: str) -> ObjectInfo | None:
        return self._do("stat", key, lambda: self.inner.stat(key))

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        return self._do("list", prefix, lambda: self.inner.list(prefix, recursive=recursive))

    def list_dirs(self, prefix: str) -> Sequence[str]:
        return self._do("list_dirs", prefix, lambda: self.inner.list_dirs(prefix))

    def delete(self, key: str) -> None:
        self._do("delete", key, lambda: self.inner.delete(key))

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return self._do("unfinished", prefix, lambda: self.inner.unfinished(prefix))

    def abort(self, upload: Unfinished) -> None:
        self._do("abort", upload.key, lambda: self.inner.abort(upload))

    def _do(self, verb: str, key: str, action: Callable[[], _T]) -> _T:
        with self._lock:
            index = len(self.operations)
            self.operations.append((verb, key))
        return self.around(index, verb, key, action)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.inner!r})"


class CrashingStore(StoreWrapper):
    """The process dies at operation `crash_at`: "before" it takes effect, "after" (the caller never hears of it), or
    "torn", in which a blob is there with half its bytes (any other verb: as "before"). Whatever the dead process tries
    afterwards has no effect.
    """

    def __init__(self, inner: Store, crash_at: int, mode: str = "before") -> None:
        if mode not in CRASH_MODES:
            raise ValueError(f"mode must be one of {CRASH_MODES}, not {mode!r}")
        super().__init__(inner)
        self.crash_at = crash_at
        self.mode = mode
        self.dead = False

    def around(self, index: int, verb: str, key: str, action: Callable[[], _T]) -> _T:
        if not self.dead and index < self.crash_at:
            return action()
        dies_now = not self.dead and index == self.crash_at
        self.dead = True
        if dies_now and (self.mode == "after" or (self.mode == "torn" and verb == "put_blob")):
            action()
        raise SimulatedCrash(f"{self.mode} operation {index}: {verb} {key}")

    def source(self, index: int, source: BlobSource) -> BlobSource:
        torn = self.mode == "torn" and self.dead
        return TornSource(source) if torn else source


class TornSource:
    """The first half of a source's bytes."""

    def __init__(self, source: BlobSource) -> None:
        self._source = source
        self.size = source.size // 2
        self.chunk_size = source.chunk_size

    def chunk(self, i: int) -> memoryview:
        return self._source.chunk(i)[: self.size - i * self.chunk_size]

    def padded_chunk(self, i: int) -> memoryview | None:
        return None


class LostReplyStore(StoreWrapper):
    """The operations at the indices `lost` are done, but their reply never comes: the caller sees a transient error."""

    def __init__(self, inner: Store, lost: Collection[int]) -> None:
        super().__init__(inner)
        self.lost = lost

    def around(self, index: int, verb: str, key: str, action: Callable[[], _T]) -> _T:
        result = action()
        if index in self.lost:
            raise TransientStoreError(f"The reply of {verb} {key} was lost.")
        return result


class FailingStore(StoreWrapper):
    """`fails(index, verb, key)` returns the error that an operation raises instead of being done, or None."""

    def __init__(self, inner: Store, fails: Callable[[int, str, str], Exception | None]) -> None:
        super().__init__(inner)
        self.fails = fails

    def around(self, index: int, verb: str, key: str, action: Callable[[], _T]) -> _T:
        error = self.fails(index, verb, key)
        if error is not None:
            raise error
        return action()


class SlowStore(StoreWrapper):
    """Operations for which `holds(verb, key)` is true wait until `release` is set; `reached` tells that one does."""

    def __init__(self, inner: Store, holds: Callable[[str, str], bool], *, timeout_s: float = 60.0) -> None:
        super().__init__(inner)
        self.holds = holds
        self.reached = threading.Event()
        self.release = threading.Event()
        self._timeout_s = timeout_s

    def around(self, index: int, verb: str, key: str, action: Callable[[], _T]) -> _T:
        if self.holds(verb, key):
            self.reached.set()
            if not self.release.wait(self._timeout_s):
                raise TimeoutError(f"{verb} {key} was never released")
        return action()
