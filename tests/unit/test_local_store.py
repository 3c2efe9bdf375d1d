"""What a file system does to a store: errors by kind, durability, races. (Errors are injected by errno: tests may run
as root, for whom permissions do not hold.)"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from spot_core import AccessError, Depth, KeyExistsError, KeyMissingError, Reason, Run, StoreError, TransientStoreError
from spot_core.store import BytesSource, LocalStore


def raising(number: int) -> Callable[..., Any]:
    def fail(*args: object, **kwargs: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


KINDS = [
    (errno.EACCES, AccessError, Reason.ACCESS),
    (errno.EPERM, AccessError, Reason.ACCESS),
    (errno.EROFS, AccessError, Reason.ACCESS),
    (errno.EIO, StoreError, Reason.STORE),
    (errno.ENOSPC, StoreError, Reason.NO_SPACE),
    (errno.EDQUOT, StoreError, Reason.NO_SPACE),
    (errno.ESTALE, TransientStoreError, Reason.TRANSIENT),
    (errno.ETIMEDOUT, TransientStoreError, Reason.TRANSIENT),
    (errno.ENOENT, KeyMissingError, Reason.KEY_MISSING),
    (errno.ENOTDIR, KeyMissingError, Reason.KEY_MISSING),
]


@pytest.mark.parametrize(("number", "cls", "reason"), KINDS)
def test_errors_by_kind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, cls: type[StoreError], reason: Reason
) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(Path, "read_bytes", raising(number))
    with pytest.raises(StoreError) as caught:
        store.get("a")
    assert type(caught.value) is cls
    assert caught.value.reason is reason
    assert "a at " + str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
def test_a_folder_that_cannot_be_listed_is_not_empty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "scandir", raising(number))
    for look in (lambda s: s.list("a/"), lambda s: s.list_dirs("a/")):
        with pytest.raises(StoreError):
            look(LocalStore(tmp_path))
    with pytest.raises(StoreError):
        Run.open(tmp_path).select(Depth.MARKER)


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO])
def test_a_file_that_cannot_be_looked_at_is_not_absent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(Path, "stat", raising(number))
    with pytest.raises(StoreError):
        LocalStore(tmp_path).stat("a")


def test_a_root_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file")
    with pytest.raises(StoreError, match="is a file"):
        LocalStore(tmp_path / "run").list("")
    with pytest.raises(StoreError):
        Run.open(tmp_path / "run").claim()


def test_a_failed_put_leaves_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = LocalStore(tmp_path)
    monkeypatch.setattr(os, "fsync", raising(errno.EIO))
    for act in (
        lambda: store.put_if_absent("a", b"1"),
        lambda: store.put("a", b"1"),
        lambda: store.put_blob("a", BytesSource(b"1", 4096)),
    ):
        with pytest.raises(StoreError):
            act()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS])
def test_without_hard_links_names_are_still_taken_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    monkeypatch.setattr(os, "link", raising(number))
    store = LocalStore(tmp_path)
    store.put_if_absent("a/b", b"first")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("a/b", b"second")
    assert store.get("a/b") == b"first"
    assert [info.key for info in store.list("")] == ["a/b"]


@pytest.mark.parametrize("verb", ["put_if_absent", "put", "put_blob"])
def test_the_file_and_every_folder_up_to_the_root_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    """In this order: the bytes before the name. Also folders that were there: another process may have made them."""
    root = tmp_path / "x" / "run"
    synced: list[str] = []
    real = os.fsync

    def fsync(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}"))
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    value: Any = BytesSource(b"1", 4096) if verb == "put_blob" else b"1"
    store = LocalStore(root)
    getattr(store, verb)("g/1/a", value)
    folders = [str(root / "g" / "1"), str(root / "g"), str(root)]
    assert synced[-3:] == folders
    assert str(root.parent) in synced, "the root's own name must survive too"
    assert str(root / "g" / "1") == os.path.dirname(synced[-4])
    synced.clear()
    getattr(store, verb)("g/1/b", value)
    assert synced[-3:] == folders
    assert len(synced) == 4, "what lies above the root is synced once, not at every save"
    synced.clear()
    getattr(store, verb)("g/2/a", value)
    assert str(root.parent) not in synced
    assert synced[-3:] == [str(root / "g" / "2"), *folders[1:]]
    synced.clear()
    getattr(LocalStore(root), verb)("g/1/c", value)
    assert str(root.parent) in synced, "another process may have made the root and not synced it yet"


def test_a_file_system_without_folder_sync_is_borne(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.fsync

    def fsync(fd: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{fd}"):
            raise OSError(errno.EINVAL, "no")
        real(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    LocalStore(tmp_path).put_if_absent("a/b", b"1")
    assert LocalStore(tmp_path).get("a/b") == b"1"


def test_pruned_folders_go_and_others_stay(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    for key in ("g/1/a", "g/1/b", "g/2/a"):
        store.put_if_absent(key, b"")
    store.delete("g/1/a")
    store.delete("g/1/b")
    assert list(store.list_dirs("g/")) == ["2"]
    store.delete("g/2/a")
    assert list(tmp_path.iterdir()) == []
    assert tmp_path.exists(), "the root is the user's"


def test_a_folder_that_goes_while_a_file_is_made_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prune elsewhere removes the empty folder between its making and the file's."""
    store = LocalStore(tmp_path)
    real, calls = os.open, []

    def opening(path: Any, flags: int, *args: Any, **kwargs: Any) -> int:
        if flags & os.O_CREAT and not calls:
            calls.append(path)
            os.rmdir(os.path.dirname(path))
        return real(path, flags, *args, **kwargs)

    monkeypatch.setattr(os, "open", opening)
    store.put_if_absent("g/1/a", b"1")
    assert store.get("g/1/a") == b"1"


def test_leftovers_of_a_crash_are_listed_and_can_be_removed(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    store.put_if_absent("g/1/a", b"1")
    (tmp_path / "g" / "1" / ".tmp-0123456789abcdef").write_bytes(b"half")
    keys = [info.key for info in store.list("g/1/")]
    assert keys == ["g/1/.tmp-0123456789abcdef", "g/1/a"]
    for key in keys:
        store.delete(key)
    assert list(tmp_path.iterdir()) == []
