"""A store in a folder of a POSIX file system.

Durability: a file is fsynced before its name appears, and every folder from it up to the root after. All of them,
also those that another process made: whoever made one may not have synced it yet.
A crash can leave ``.tmp-*`` files; they are listed like any object, belong to nothing and go with their folder.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from spot_core.errors import KeyExistsError, KeyMissingError, Reason, StoreError
from spot_core.store import _direct
from spot_core.store._base import BlobSource, Capabilities, ObjectInfo, Unfinished, check_key, check_prefix
from spot_core.store._errno import translate

__all__ = ["LocalStore"]

_NO_LINK = {errno.EPERM, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV}
_NO_DIR_SYNC = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.ENOSYS, errno.EBADF}


class LocalStore:
    """Objects as files below `root`, which need not exist yet."""

    def __init__(self, root: str | os.PathLike[str]) -> None:
        self.root = Path(os.path.abspath(os.fspath(root)))
        self.uri = str(self.root)
        self.storage_options: Mapping[str, Any] = {}
        self.capabilities = Capabilities(put_if_absent=True, reopenable=True)
        self._anchored = False  # the root's name, and those of its ancestors, are known to be on disk

    def put_if_absent(self, key: str, data: bytes) -> None:
        with self._errors("create", key):
            path = self._prepare(key)
            temporary = self._write_temporary(path, data)
            try:
                # link fails when the name is taken, so exactly one of several racing writers wins, and the name
                # appears with the whole content at once.
                os.link(temporary, path)
            except OSError as error:
                if error.errno not in _NO_LINK:
                    raise
                _create_exclusively(path, data)
            finally:
                os.unlink(temporary)
            self._sync_dirs(path.parent)

    def put(self, key: str, data: bytes) -> None:
        with self._errors("replace", key):
            path = self._prepare(key)
            temporary = self._write_temporary(path, data)
            try:
                os.replace(temporary, path)
            except OSError:
                os.unlink(temporary)
                raise
            self._sync_dirs(path.parent)

    def put_blob(self, key: str, source: BlobSource) -> None:
        with self._errors("write", key):
            path = self._prepare(key)
            _direct.write_file(path, source)
            self._sync_dirs(path.parent)

    def get(self, key: str) -> bytes:
        with self._errors("read", key):
            return self._path(key).read_bytes()

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        with self._errors("read", key):
            try:
                _direct.read_ranges(self._path(key), ranges, threads)
            except EOFError as error:
                raise StoreError(f"{key} at {self.uri} is too short: {error}.", reason=Reason.TRUNCATED) from error

    def stat(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("stat", key):
                path = self._path(key)
                found = path.stat()
                return ObjectInfo(key, found.st_size, found.st_mtime) if path.is_file() else None
        except KeyMissingError:
            return None

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        check_prefix(prefix)
        found: list[ObjectInfo] = []
        pending = [prefix]
        while pending:
            here = pending.pop()
            for entry in self._scan(here):
                key = here + entry.name
                if entry.is_dir(follow_symlinks=False):
                    if recursive:
                        pending.append(f"{key}/")
                    continue
                # A file may go between scan and stat (a prune elsewhere): then it is not there.
                with suppress(KeyMissingError), self._errors("stat", key):
                    about = entry.stat()
                    found.append(ObjectInfo(key, about.st_size, about.st_mtime))
        return sorted(found, key=lambda info: info.key)

    def list_dirs(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        return sorted(entry.name for entry in self._scan(prefix) if entry.is_dir(follow_symlinks=False))

    def delete(self, key: str) -> None:
        with self._errors("delete", key):
            path = self._path(key)
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError):
                return
            # Empty folders are removed, so that a pruned generation leaves no name behind.
            for parent in path.parents:
                if parent == self.root:
                    break
                try:
                    parent.rmdir()
                except OSError:
                    break
            self._sync_dirs(path.parent)

    def _path(self, key: str) -> Path:
        return self.root / check_key(key)

    def _prepare(self, key: str) -> Path:
        path = self._path(key)
        if not path.parent.is_dir():
            self._anchored &= self.root.is_dir()
            path.parent.mkdir(parents=True, exist_ok=True)
        if not self._anchored:
            # The root's own ancestors may be new as well: their names must survive too. Once is enough.
            _sync_chain(self.root, Path(self.root.anchor))
            self._anchored = True
        return path

    def _write_temporary(self, path: Path, data: bytes) -> Path:
        while True:
            temporary = path.parent / f".tmp-{secrets.token_hex(8)}"
            try:
                _create_exclusively(temporary, data)
            except FileNotFoundError:
                # A prune elsewhere removed the folder as empty, in between.
                path.parent.mkdir(parents=True, exist_ok=True)
                continue
            return temporary

    def _sync_dirs(self, folder: Path) -> None:
        _sync_chain(folder, self.root)

    def _scan(self, prefix: str) -> Sequence[os.DirEntry[str]]:
        try:
            with self._errors("list", prefix), os.scandir(self.root / prefix) as entries:
                return list(entries)
        except KeyMissingError:
            if self.root.exists() and not self.root.is_dir():
                raise StoreError(f"{self.uri} is a file, not a folder.", reason=Reason.NOT_A_RUN) from None
            return []

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except StoreError:
            raise
        except FileExistsError as error:
            raise KeyExistsError(f"{key} exists at {self.uri}.") from error
        except OSError as error:
            raise translate(error, verb, key, self.uri) from error

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return ()

    def abort(self, upload: Unfinished) -> None:
        pass

    def __repr__(self) -> str:
        return f"LocalStore({self.uri!r})"


def _create_exclusively(path: Path, data: bytes) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        with open(fd, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        with suppress(OSError):
            path.unlink()
        raise


def _sync_chain(folder: Path, top: Path) -> None:
    """fsync `folder` and its parents up to and including `top`; those that vanished meanwhile need none."""
    for current in (folder, *folder.parents):
        try:
            fd = os.open(current, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except (FileNotFoundError, PermissionError):
            # Gone with a prune, or an ancestor that this identity may pass but not read: not made by us.
            pass
        else:
            try:
                os.fsync(fd)
            except OSError as error:
                # Some network file systems have no fsync for folders; their metadata is synchronous instead.
                if error.errno not in _NO_DIR_SYNC:
                    raise
            finally:
                os.close(fd)
        if current == top:
            return
