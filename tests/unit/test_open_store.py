from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from spot_core import ConfigError, Run
from spot_core.store import CloudStore, FsspecStore, LocalStore, MemoryStore, open_store


@pytest.mark.parametrize(
    ("uri", "cls", "shown"),
    [
        ("/data/runs/a", LocalStore, "/data/runs/a"),
        ("/data/runs/../runs/a/", LocalStore, "/data/runs/a"),
        ("file:///data/my%20runs", LocalStore, "/data/my runs"),
        ("file://localhost/data", LocalStore, "/data"),
        ("runs/a", LocalStore, os.path.abspath("runs/a")),
        ("~/runs", LocalStore, os.path.expanduser("~/runs")),
        ("memory://x/y/", MemoryStore, "memory://x/y"),
        ("s3://bucket/a/b/", CloudStore, "s3://bucket/a/b"),
        ("az://container/a", CloudStore, "az://container/a"),
        ("abfss://container@account.dfs.core.windows.net/a", CloudStore, "abfss://container@account.dfs.core.windows.net/a"),
    ],
)
def test_the_uri_picks_the_backend(uri: str, cls: type, shown: str) -> None:
    store = open_store(uri)
    assert type(store) is cls
    assert store.uri == shown
    assert open_store(store.uri).uri == store.uri


def test_a_path_object_is_a_path(tmp_path: Path) -> None:
    assert open_store(tmp_path).uri == str(tmp_path)


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("", "Not a run location"),
        ("  ", "Not a run location"),
        (" /data", "Not a run location"),
        ("/data\0", "Not a run location"),
        ("s3:/bucket/run", "'//' is missing"),
        ("s3:bucket/run", "'//' is missing"),
        ("s3://", "names no place"),
        ("s3:///", "names no place"),
        ("memory://", "names no place"),
        ("file://", "empty"),
        ("file://host/data", "names a host"),
        ("no-such-scheme://bucket/run", "Unknown scheme"),
        ("simplecache::s3://bucket/run", "neither a path nor a URI"),
        ("filecache://x::s3://bucket/run", "chains file systems"),
    ],
)
def test_what_is_no_location_is_refused(uri: str, told: str) -> None:
    for opener in (open_store, Run.open):
        with pytest.raises(ConfigError, match=told):
            opener(uri)


@pytest.mark.parametrize("uri", [b"/data", 3, None])
def test_other_things_are_refused(uri: object) -> None:
    with pytest.raises((ConfigError, TypeError)):
        Run.open(uri)  # type: ignore[arg-type]


@pytest.mark.parametrize("uri", ["sftp://me:hunter2@host/run", "s3://key:hunter2@bucket/run"])
def test_a_password_in_the_uri_is_refused_and_not_repeated(uri: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(uri)
    assert "hunter2" not in str(caught.value)
    assert ":***@" in str(caught.value)


@pytest.mark.parametrize("uri", ["/data/run", "memory://x"])
def test_options_that_would_be_ignored_are_refused_without_their_values(uri: str) -> None:
    with pytest.raises(ConfigError, match="key, secret") as caught:
        open_store(uri, storage_options={"secret": "hunter2", "key": "hunter3"})
    assert "hunter" not in str(caught.value)


def test_a_store_brings_its_own_options() -> None:
    store = MemoryStore()
    assert Run.open(store).store is store
    with pytest.raises(ConfigError, match="has its own"):
        Run.open(store, storage_options={"key": "x"})


def test_memory_uris_share_their_state_and_private_stores_do_not() -> None:
    open_store("memory://shared/one").put("a", b"1")
    assert open_store("memory://shared/one/").get("a") == b"1"
    assert open_store("memory://shared/two").stat("a") is None
    MemoryStore().put("a", b"2")
    assert MemoryStore().stat("a") is None


def test_opening_has_no_effect(tmp_path: Path) -> None:
    open_store(tmp_path / "run")
    Run.open(tmp_path / "run")
    FsspecStore(f"file://{tmp_path}/run")
    assert list(tmp_path.iterdir()) == []


def test_a_missing_backend_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    import fsspec

    def missing(protocol: str) -> type:
        raise ImportError("Install gcsfs to access Google Storage")

    monkeypatch.setattr(fsspec, "get_filesystem_class", missing)
    with pytest.raises(ConfigError, match=r"pip install 'lightning-spot\[gcs\]'"):
        open_store("gs://bucket/run")
    monkeypatch.setitem(sys.modules, "obstore", None)
    for uri, extra in (("s3://bucket/run", "s3"), ("az://container/run", "azure")):
        with pytest.raises(ConfigError, match=rf"pip install 'lightning-spot\[{extra}\]'"):
            open_store(uri)
