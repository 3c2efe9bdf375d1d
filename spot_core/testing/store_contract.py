"""What every `Store` must do, as a pytest class. A backend's test module subclasses it and gives a `store` fixture:

class TestMyStore(StoreContract):
    @pytest.fixture
    def store(self, tmp_path):
        return MyStore(tmp_path)
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from spot_core.errors import ConfigError, KeyExistsError, KeyMissingError, Reason, StoreError
from spot_core.store import BytesSource, Store, put_once

__all__ = ["BrokenSource", "StoreContract"]

PAGE = 4096


class BrokenSource(BytesSource):
    """A source that fails at its last chunk, as staging does when the trainer's memory is gone."""

    def chunk(self, i: int) -> memoryview:
        if (i + 1) * self.chunk_size >= self.size:
            raise RuntimeError("the source broke")
        return super().chunk(i)


class StoreContract:
    """Subclass it and override the fixture `store` with an empty store; `reopen` where a URI alone does not do."""

    @pytest.fixture
    def store(self) -> Any:
        raise NotImplementedError("override the fixture `store`")

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        """Opens the same objects by a second handle, with no state shared with the first if that can be had."""
        return lambda: store

    def test_an_empty_store_answers_empty(self, store: Store) -> None:
        assert list(store.list("")) == []
        assert list(store.list("a/")) == []
        assert list(store.list_dirs("")) == []
        assert list(store.list_dirs("a/")) == []
        assert store.stat("a/b") is None
        with pytest.raises(KeyMissingError):
            store.get("a/b")

    def test_put_if_absent_creates_whole(self, store: Store) -> None:
        data = bytes(range(256)) * 5
        store.put_if_absent("a/b.json", data)
        assert store.get("a/b.json") == data
        info = store.stat("a/b.json")
        assert info is not None
        assert (info.key, info.size) == ("a/b.json", len(data))

    @pytest.mark.parametrize("data", [b"", b"mine", b"other and longer"])
    def test_put_if_absent_refuses_a_taken_name(self, store: Store, data: bytes) -> None:
        store.put_if_absent("a/b", b"mine")
        with pytest.raises(KeyExistsError):
            store.put_if_absent("a/b", data)
        assert store.get("a/b") == b"mine"

    def test_put_once_takes_its_own_bytes_for_success(self, store: Store) -> None:
        put_once(store, "a", b"nonce 1")
        put_once(store, "a", b"nonce 1")
        with pytest.raises(KeyExistsError):
            put_once(store, "a", b"nonce 2")

    def test_a_race_has_one_winner(self, store: Store, reopen: Callable[[], Store]) -> None:
        if not store.capabilities.put_if_absent:
            pytest.skip("this store has no put-if-absent, and says so")
        for turn in range(10):

            def race(n: int, key: str = f"race/{turn}") -> bool:
                try:
                    reopen().put_if_absent(key, b"%d" % n)
                except KeyExistsError:
                    return False
                return True

            with ThreadPoolExecutor(8) as pool:
                won = list(pool.map(race, range(8)))
            assert won.count(True) == 1
            assert store.get(f"race/{turn}") == b"%d" % won.index(True)

    def test_put_replaces(self, store: Store) -> None:
        store.put("p", b"a longer first value")
        store.put("p", b"second")
        assert store.get("p") == b"second"

    @pytest.mark.parametrize("size", [0, 1, PAGE - 1, PAGE, PAGE + 1, 3 * PAGE + 17])
    def test_put_blob_keeps_every_byte(self, store: Store, size: int) -> None:
        data = bytes(i * 7 % 251 for i in range(size))
        store.put_blob("g/x.blob", BytesSource(data, PAGE))
        assert store.get("g/x.blob") == data
        info = store.stat("g/x.blob")
        assert info is not None
        assert info.size == size

    def test_a_blob_that_fails_half_way_is_not_published(self, store: Store, reopen: Callable[[], Store]) -> None:
        """The source's own error comes through, and no object is left to be taken for a whole one."""
        with pytest.raises(RuntimeError, match="the source broke"):
            store.put_blob("g/x.blob", BrokenSource(bytes(5 * PAGE), PAGE))
        assert reopen().stat("g/x.blob") is None
        assert [info.key for info in reopen().list("")] == []
        store.put_blob("g/x.blob", BytesSource(b"second try", PAGE))
        assert store.get("g/x.blob") == b"second try"

    def test_get_ranges_fills_buffers_contiguously(self, store: Store) -> None:
        data = bytes(i * 31 % 253 for i in range(3 * PAGE))
        store.put_blob("b", BytesSource(data, PAGE))
        buffers = [bytearray(10), bytearray(0), bytearray(PAGE + 3), bytearray(5), bytearray(1)]
        first, second = buffers[:3], buffers[3:]
        store.get_ranges(
            "b", [(7, [memoryview(b) for b in first]), (3 * PAGE - 6, [memoryview(b) for b in second])], threads=2
        )
        assert b"".join(first) == data[7 : 7 + 10 + PAGE + 3]
        assert b"".join(second) == data[-6:]

    def test_get_ranges_refuses_to_come_back_short(self, store: Store) -> None:
        store.put_blob("b", BytesSource(b"12345", PAGE))
        with pytest.raises(StoreError) as caught:
            store.get_ranges("b", [(2, [memoryview(bytearray(10))])])
        assert caught.value.reason is Reason.TRUNCATED
        with pytest.raises(StoreError) as caught:
            store.get_ranges("b", [(100, [memoryview(bytearray(1))])])
        assert caught.value.reason is Reason.TRUNCATED
        with pytest.raises(KeyMissingError):
            store.get_ranges("nothing", [(0, [memoryview(bytearray(1))])])

    def test_lists_below_a_prefix_and_no_further(self, store: Store) -> None:
        for key in ("top", "a/1", "a/b/2", "a/b/c/3", "ab/4"):
            store.put_if_absent(key, b"x" * len(key))
        assert [info.key for info in store.list("")] == ["a/1", "a/b/2", "a/b/c/3", "ab/4", "top"]
        assert [(info.key, info.size) for info in store.list("a/")] == [("a/1", 3), ("a/b/2", 5), ("a/b/c/3", 7)]
        assert [info.key for info in store.list("", recursive=False)] == ["top"]
        assert [info.key for info in store.list("a/", recursive=False)] == ["a/1"]
        assert list(store.list_dirs("")) == ["a", "ab"]
        assert list(store.list_dirs("a/")) == ["b"]
        assert list(store.list("top/")) == []

    def test_a_listing_is_fresh(self, store: Store, reopen: Callable[[], Store]) -> None:
        other = reopen()
        store.put_if_absent("g/1/x", b"1")
        assert list(other.list_dirs("g/")) == ["1"]
        store.put_if_absent("g/2/x", b"2")
        store.put_if_absent("g/1/y", b"3")
        assert list(other.list_dirs("g/")) == ["1", "2"]
        assert [info.key for info in other.list("g/")] == ["g/1/x", "g/1/y", "g/2/x"]
        assert other.stat("g/2/x") is not None
        store.delete("g/2/x")
        assert [info.key for info in other.list("g/")] == ["g/1/x", "g/1/y"]
        assert other.stat("g/2/x") is None

    def test_delete_is_idempotent_and_takes_nothing_else(self, store: Store) -> None:
        store.put_if_absent("a/1", b"1")
        store.put_if_absent("a/2", b"2")
        store.delete("a/1")
        store.delete("a/1")
        store.delete("never/was")
        assert [info.key for info in store.list("")] == ["a/2"]
        store.put_if_absent("a/1", b"again")
        assert store.get("a/1") == b"again"

    @pytest.mark.parametrize(
        "key", ["", "/a", "a/", "a//b", "..", "../a", "a/../b", "a/./b", ".", "a\\b", "a\0b", "a b"]
    )
    def test_keys_cannot_leave_the_store(self, store: Store, key: str) -> None:
        for verb in (
            lambda: store.put_if_absent(key, b""),
            lambda: store.put(key, b""),
            lambda: store.put_blob(key, BytesSource(b"", PAGE)),
            lambda: store.get(key),
            lambda: store.get_ranges(key, []),
            lambda: store.stat(key),
            lambda: store.delete(key),
        ):
            with pytest.raises(ConfigError):
                verb()
        assert list(store.list("")) == []

    @pytest.mark.parametrize("prefix", ["a", "/", "../", "a/../", "a//"])
    def test_prefixes_cannot_leave_the_store(self, store: Store, prefix: str) -> None:
        with pytest.raises(ConfigError):
            store.list(prefix)
        with pytest.raises(ConfigError):
            store.list_dirs(prefix)

    def test_many_threads_put_at_once(self, store: Store) -> None:
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda n: store.put_if_absent(f"d/{n % 3}/{n}", b"%d" % n), range(60)))
        assert len(store.list("d/")) == 60
        assert all(store.get(f"d/{n % 3}/{n}") == b"%d" % n for n in range(60))
