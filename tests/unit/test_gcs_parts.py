"""Big objects on a store that joins objects: parts side by side, joined once, and nothing of them left."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from spot_core import StoreError, TransientStoreError
from spot_core.errors import SaveError
from spot_core.store import BytesSource, FsspecStore, _gcs_parts
from spot_core.store import _fsspec as module
from tests.unit.test_fsspec_store import Bucket, make

__all__ = ["make"]

CHUNK = 4096
DATA = bytes(range(256)) * 16 * 10 + b"tail"  # eleven chunks: parts of four, four and three


def merge(self: Bucket, path: str, paths: list[str]) -> None:
    def join() -> None:
        with self.open(path, "wb") as file:
            for name in paths:
                file.write(self.store[name].getvalue())

    self._around("merge", path, join)


@pytest.fixture
def store(make: Callable[..., FsspecStore], monkeypatch: pytest.MonkeyPatch) -> FsspecStore:
    monkeypatch.setattr(module, "_COMPOSING", {"spottest"})
    monkeypatch.setattr(_gcs_parts, "_PART", 4 * CHUNK)
    monkeypatch.setattr(Bucket, "merge", merge, raising=False)
    return make()


def test_parts_go_side_by_side_and_are_joined_in_order(store: FsspecStore) -> None:
    together = threading.Barrier(3, timeout=20)

    class Meeting(BytesSource):
        def chunk(self, i: int) -> memoryview:
            if i % 4 == 0:
                together.wait()  # the first of each part: none ends before all have begun
            return super().chunk(i)

    store.put_blob("g/blob", Meeting(DATA, CHUNK))
    assert store.get("g/blob") == DATA
    assert [info.key for info in store.list("")] == ["g/blob"]


def test_there_are_never_more_than_can_be_joined() -> None:
    class Sized(BytesSource):
        def __init__(self, size: int) -> None:
            super().__init__(b"", 1 << 22)
            self._size = size

        @property
        def size(self) -> int:
            return self._size

    for size, count in ((0, 0), (1, 1), (64 << 20, 1), ((64 << 20) + 1, 2), (64 << 25, 32), ((64 << 25) + 1, 31)):
        parts = _gcs_parts.slices(Sized(size), threading.Event())
        assert len(parts) == count
        assert sum(part.size for part in parts) == size


def test_what_a_source_raises_passes_and_nothing_stays(store: FsspecStore) -> None:
    class Failing(BytesSource):
        def chunk(self, i: int) -> memoryview:
            if i == 5:
                raise RuntimeError("the snapshot could not be taken")
            return super().chunk(i)

    with pytest.raises(RuntimeError, match="the snapshot could not be taken"):
        store.put_blob("g/blob", Failing(DATA, CHUNK))
    assert store.list("") == []


def test_the_first_that_fails_ends_the_others() -> None:
    failed, told = threading.Event(), list[bool]()

    def fail() -> None:
        raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        _gcs_parts.side_by_side([lambda: told.append(failed.wait(20)), fail], failed)
    assert told == [True]
    with pytest.raises(SaveError, match="another part"):
        _gcs_parts.Slice(BytesSource(DATA, CHUNK), 0, 1, failed).chunk(0)


def test_a_join_is_tried_again_and_told_when_it_cannot_be(store: FsspecStore, monkeypatch: pytest.MonkeyPatch) -> None:
    errors: list[Exception] = [ConnectionResetError("reset"), ConnectionResetError("reset")]

    def fail(self: Any, verb: str, path: str) -> None:
        if verb == "merge" and errors:
            raise errors.pop()

    monkeypatch.setattr(Bucket, "before", lambda verb, path: fail(None, verb, path))
    store.put_blob("g/blob", BytesSource(DATA, CHUNK))
    assert store.get("g/blob") == DATA
    errors.append(PermissionError(13, "no"))
    with pytest.raises(StoreError, match="join the parts of g/other"):
        store.put_blob("g/other", BytesSource(DATA, CHUNK))
    assert [info.key for info in store.list("")] == ["g/blob"]


@pytest.mark.usefixtures("store")
def test_a_join_that_lacks_a_part_is_no_success(
    make: Callable[..., FsspecStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Bucket, "merge", lambda self, path, paths: merge(self, path, paths[:-1]), raising=False)
    store = make(retry_s=0.1)
    with pytest.raises(StoreError, match="not the 40964 that were written"):
        store.put_blob("g/blob", BytesSource(DATA, CHUNK))


@pytest.mark.usefixtures("store")
def test_parts_that_cannot_be_deleted_cost_no_save(
    make: Callable[..., FsspecStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(self: Bucket, path: str) -> None:
        raise ConnectionResetError("reset")

    monkeypatch.setattr(Bucket, "rm_file", refuse)
    store = make(retry_s=0.1)
    store.put_blob("g/blob", BytesSource(DATA, CHUNK))
    assert store.get("g/blob") == DATA
    with pytest.raises(TransientStoreError):
        store.delete("g/blob.part-00")
