"""Every shipped backend keeps the store contract."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import pytest

from spot_core.store import FsspecStore, LocalStore, MemoryStore, Store, open_store
from spot_core.testing import StoreContract


class TestLocal(StoreContract):
    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return open_store(tmp_path / "not" / "made" / "yet")

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        return lambda: LocalStore(store.uri)


class TestMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Store:
        return open_store(f"memory://{uuid.uuid4().hex}/run")

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        return lambda: MemoryStore.named(store.uri)


class TestFsspecMemory(StoreContract):
    @pytest.fixture
    def store(self) -> Iterator[Store]:
        uri = f"memory://{uuid.uuid4().hex}/run"
        yield FsspecStore(uri, retry_s=0.2)
        fsspec.filesystem("memory").rm(uri, recursive=True) if fsspec.filesystem("memory").exists(uri) else None

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        return lambda: FsspecStore(store.uri)


class TestFsspecLocal(StoreContract):
    """A local folder through fsspec: the way of every file system with real folders (sftp, smb, hdfs)."""

    @pytest.fixture
    def store(self, tmp_path: Path) -> Store:
        return FsspecStore(f"file://{tmp_path}/run", retry_s=0.2)

    @pytest.fixture
    def reopen(self, store: Store) -> Callable[[], Store]:
        return lambda: FsspecStore(store.uri)
