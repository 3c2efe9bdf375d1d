"""A store on any file system that fsspec knows (fsspec is imported at use).

What is not left to the backends: no listing comes from a cache; an error in a listing is an error, where fsspec's own
`find` and `walk` answer as if there were nothing; a write that fails half-way is taken back, where `with fs.open(...)`
would publish what had been written; nothing is renamed.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import stamina

from spot_core.errors import (
    AccessError,
    ConfigError,
    KeyExistsError,
    KeyMissingError,
    Reason,
    StoreError,
    TransientStoreError,
)
from spot_core.store._backend_errors import translate_backend
from spot_core.store._base import BlobSource, Capabilities, ObjectInfo, Unfinished, check_key, check_prefix, chunk_count
from spot_core.store._crc32c import Crc32c
from spot_core.store._gcs_parts import BLOCK, side_by_side, slices
from spot_core.store._pieces import read_pieces, scatter
from spot_core.store._readback import put_once
from spot_core.store._secrets import scrub

__all__ = ["FsspecStore"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

# Protocols whose `mode="create"` is a condition that the server checks. Everywhere else fsspec looks first and writes
# then, which two writers can both pass.
_GCS = {"gs", "gcs"}
_CONDITIONAL = _GCS
# Protocols without folders of their own. Elsewhere they are made first (asked to, gcsfs would make a bucket).
_FLAT = _CONDITIONAL | {"memory"}
# Protocols that join objects, so that parts can be sent side by side.
_COMPOSING = _GCS
_WRITING = {"create", "replace", "write"}
_MIN_BLOCK, _MAX_PARTS = 16 << 20, 9_000
"""Bytes per uploaded part, and how many parts an object may have (S3 allows 10,000)."""
_REQUEST_S = 120.0
"""A request that takes longer is given up and tried again."""


class FsspecStore:
    """Objects on any fsspec file system.

    Args:
        uri: such as ``s3://bucket/run``.
        storage_options: for the file system's constructor, untouched. Shown nowhere.
        retry_s: seconds during which transient errors are tried again, per verb.

    Raises:
        ConfigError: unknown scheme, or the backend's package is missing.
    """

    def __init__(self, uri: str, *, storage_options: Mapping[str, Any] | None = None, retry_s: float = 60.0) -> None:
        self.uri = uri.rstrip("/")
        self.storage_options: Mapping[str, Any] = dict(storage_options or {})
        self._retry_s = retry_s
        self._protocol = uri.split("://", 1)[0].lower()
        self._lock = threading.Lock()
        self._opened: tuple[Any, str] | None = None
        self._capabilities: Capabilities | None = None
        self.reopenable = self._protocol != "memory"
        _check_protocol(self._protocol)

    @property
    def capabilities(self) -> Capabilities:
        with self._lock:
            known = self._capabilities
        if known is None:
            known = Capabilities(put_if_absent=self._probe(), reopenable=self.reopenable)
            with self._lock:
                self._capabilities = known
        return known

    def put_if_absent(self, key: str, data: bytes) -> None:
        path = self._path(key)

        def create() -> None:
            if self._conditional():
                self._call("create", key, lambda fs: fs.pipe_file(path, data, mode="create"))
            elif self.stat(key) is not None:
                raise KeyExistsError(f"{key} exists at {self.uri}.")
            else:
                self._call("create", key, lambda fs: fs.pipe_file(path, data))

        self._retry(create)

    def put(self, key: str, data: bytes) -> None:
        path = self._path(key)
        self._retry(lambda: self._call("replace", key, lambda fs: fs.pipe_file(path, data)))

    def put_blob(self, key: str, source: BlobSource) -> None:
        failed = threading.Event()
        parts = slices(source, failed) if self._protocol in _COMPOSING else []
        if len(parts) < 2:
            self._stream(key, source, max(_MIN_BLOCK, source.chunk_size, -(-source.size // _MAX_PARTS)))
            return
        names = [f"{check_key(key)}.part-{number:02d}" for number in range(len(parts))]
        try:
            jobs = (partial(self._stream, name, part, BLOCK) for name, part in zip(names, parts, strict=True))
            side_by_side(jobs, failed)
            paths = [self._path(name) for name in names]
            self._retry(lambda: self._call("join the parts of", key, lambda fs: fs.merge(self._path(key), paths)))
            self._retry(lambda: self._compare(key, source.size, None))
        finally:
            self._clear(names)

    def _clear(self, names: Sequence[str]) -> None:
        """They have served; one that stays is in the way of nothing, and goes with its generation."""
        try:
            side_by_side((partial(self.delete, name) for name in names), threading.Event())
        except StoreError as error:
            _log.warning("Parts of an upload may remain at %s: %s", self.uri, error)

    def _stream(self, key: str, source: BlobSource, block: int) -> None:
        path = self._path(key)

        def upload() -> None:
            # autocommit=False: the object appears with commit(), never by closing.
            file = self._call("write", key, lambda fs: fs.open(path, "wb", block_size=block, autocommit=False))
            summed = Crc32c() if self._protocol in _GCS else None
            try:
                for i in range(chunk_count(source)):
                    chunk = source.chunk(i)  # outside of the translation: a source's own errors pass as they are
                    with self._errors("write", key):
                        file.write(chunk)
                    if summed is not None:
                        summed.update(chunk)
                with self._errors("write", key):
                    file.close()
                    file.commit()
                self._compare(key, source.size, None if summed is None else summed.text)
            except BaseException:
                self._take_back(file, key, path)
                raise

        self._retry(upload)

    def _compare(self, key: str, size: int, crc32c: str | None) -> None:
        """The store's own account of what it has. A block that was sent again after a lost reply may be there twice."""
        found = self._call("look up", key, lambda fs: dict(_fresh(fs, self._path(key))))
        if found.get("size", size) != size:
            told = f"{key} at {self.uri} has {found['size']} bytes, not the {size} that were written."
            raise TransientStoreError(told)
        if crc32c is not None and found.get("crc32c", crc32c) != crc32c:
            raise TransientStoreError(f"{key} at {self.uri} is not what was written: its CRC32C is another.")

    def get(self, key: str) -> bytes:
        path = self._path(key)
        return self._retry(lambda: bytes(self._call("read", key, lambda fs: fs.cat_file(path))))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        check_key(key)
        read_pieces(ranges, lambda offset, buffers: self._fill(key, offset, buffers), threads)

    def stat(self, key: str) -> ObjectInfo | None:
        path = self._path(key)

        def look() -> ObjectInfo | None:
            try:
                found = self._call("stat", key, lambda fs: _fresh(fs, path))
            except KeyMissingError:
                return None
            return _info(key, found) if found.get("type") == "file" else None

        return self._retry(look)

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        found: list[ObjectInfo] = []
        pending = [check_prefix(prefix)]
        while pending:
            here = pending.pop()
            for name, entry in self._entries(here):
                if entry.get("type") != "directory":
                    found.append(_info(here + name, entry))
                elif recursive:
                    pending.append(f"{here}{name}/")
        return sorted(found, key=lambda info: info.key)

    def list_dirs(self, prefix: str) -> Sequence[str]:
        entries = self._entries(check_prefix(prefix))
        return sorted(name for name, entry in entries if entry.get("type") == "directory")

    def delete(self, key: str) -> None:
        path = self._path(key)

        def remove() -> None:
            try:
                self._call("delete", key, lambda fs: fs.rm_file(path))
            except KeyMissingError:
                pass

        self._retry(remove)

    def _entries(self, prefix: str) -> Sequence[tuple[str, dict[str, Any]]]:
        """Names and details directly below `prefix`, straight from the backend."""

        def listing(fs: Any) -> Sequence[dict[str, Any]]:
            path = self._root(prefix.rstrip("/"))
            fs.invalidate_cache(path)
            return list(fs.ls(path, detail=True))

        def look() -> Sequence[dict[str, Any]]:
            try:
                return self._call("list", prefix, listing)
            except KeyMissingError:
                return []

        parent = self._root(prefix.rstrip("/")).strip("/")
        found = []
        for entry in self._retry(look):
            name = str(entry["name"]).strip("/")
            # An entry that is the folder itself: its marker object, or an object of that very name.
            if name != parent and name.startswith(f"{parent}/" if parent else ""):
                found.append((name[len(parent) :].strip("/"), entry))
        return found

    def _fill(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        path = self._path(key)
        size = sum(map(len, buffers))
        end = offset + size

        def read() -> None:
            try:
                data = self._call("read", key, lambda fs: fs.cat_file(path, start=offset, end=end))
            except (KeyMissingError, AccessError, TransientStoreError):
                raise
            except StoreError:
                # Some backends refuse a range beyond the end instead of answering with less.
                info = self.stat(key)
                if info is None or info.size >= end:
                    raise
                data = b""
            if len(data) != size:
                raise StoreError(f"{key} at {self.uri} ends before byte {end}.", reason=Reason.TRUNCATED)
            scatter(memoryview(data), buffers)

        self._retry(read)

    def _take_back(self, file: Any, key: str, path: str) -> None:
        """Leave nothing of a write that failed: neither a part upload, nor an object, nor a file that a later
        garbage collection would close and thereby publish."""
        try:
            file.discard()
            if hasattr(type(file), "closed") and not file.closed:
                file.closed = True
        except AttributeError:
            pass  # a plain file object: it has no such thing as publishing by closing
        except Exception as error:  # noqa: BLE001 - the write's own error is what counts, and is on its way
            _log.warning("Could not abort the upload of %s at %s: %s", key, self.uri, self._scrub(error))
        try:
            if self.stat(key) is not None:
                self.delete(key)
        except StoreError as error:
            _log.warning("A part of %s may remain at %s: %s", key, self.uri, error)

    def _probe(self) -> bool:
        """Whether a second conditional put really fails: some servers accept the condition and ignore it."""
        if self._protocol not in _CONDITIONAL:
            return False
        key = f".tmp-{secrets.token_hex(16)}"
        try:
            put_once(self, key, b"first")  # a reply may be lost here as anywhere
            try:
                self.put_if_absent(key, b"second")
            except KeyExistsError:
                pass
            return self.get(key) == b"first"
        except (AccessError, TransientStoreError):
            raise
        except StoreError as error:
            _log.warning("%s refuses conditional puts: %s", self.uri, error)
            return False
        finally:
            try:
                self.delete(key)
            except AccessError as error:
                # What the probe found counts all the same; a preflight asks about deleting by itself.
                _log.warning("%s stays at %s: %s", key, self.uri, error)

    def _conditional(self) -> bool:
        with self._lock:
            known = self._capabilities
        # Before the probe the protocol is believed: a helper process that writes names of its own need not probe.
        return self._protocol in _CONDITIONAL if known is None else known.put_if_absent

    def _retry(self, action: Callable[[], _T]) -> _T:
        # retry_context's attempts limit is off: the deadline decides.
        for attempt in stamina.retry_context(
            on=TransientStoreError, attempts=None, timeout=self._retry_s, wait_initial=0.1, wait_max=5.0
        ):
            with attempt:
                return action()
        raise AssertionError("unreachable: the last attempt returns or raises")

    def _call(self, verb: str, key: str, action: Callable[[Any], _T]) -> _T:
        with self._errors(verb, key):
            fs = self._fs()
            if verb in _WRITING and self._protocol not in _FLAT:
                fs.makedirs(self._path(key).rsplit("/", 1)[0], exist_ok=True)
            return action(fs)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - backends raise anything; whatever it is comes out as StoreError
            text = str(error)
            scrubbed = self._scrub(error)
            translated = translate_backend(error, verb, key, self.uri, scrubbed)
            # A traceback prints the cause too: drop one that tells a secret.
            raise translated from (error if scrubbed == text else None)

    def _scrub(self, error: Exception) -> str:
        return scrub(str(error), self.storage_options)

    def _fs(self) -> Any:
        with self._lock:
            if self._opened is None:
                try:
                    self._opened = _open(self.uri, self._protocol, self.storage_options)
                except (TypeError, ValueError) as error:
                    raise ConfigError(
                        f"The file system of {self.uri} refuses its storage_options: {self._scrub(error)}."
                    ) from None
            return self._opened[0]

    def _root(self, key: str) -> str:
        self._fs()
        with self._lock:
            assert self._opened is not None
            root = self._opened[1].rstrip("/")
        return f"{root}/{key}" if key else root

    def _path(self, key: str) -> str:
        return self._root(check_key(key))

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return ()

    def abort(self, upload: Unfinished) -> None:
        pass

    def __repr__(self) -> str:
        return f"FsspecStore({self.uri!r})"


def _check_protocol(protocol: str) -> None:
    import fsspec

    if protocol in _GCS:
        # Read when gcsfs is imported. Its default class first asks a gRPC service what kind of bucket it is, which
        # takes a right of its own, and a minute where there is no such service; nothing here depends on the answer.
        os.environ.setdefault("GCSFS_EXPERIMENTAL_ZB_HNS_SUPPORT", "false")
    try:
        fsspec.get_filesystem_class(protocol)
    except ValueError:
        raise ConfigError(
            f"Unknown scheme {protocol!r} in the run's URI.",
            hint="Known are s3, gs, abfs, file, memory and whatever else fsspec has.",
        ) from None
    except ImportError as error:
        extra = {"gs": "gcs", "gcs": "gcs"}.get(protocol)
        install = f"pip install 'lightning-spot[{extra}]'" if extra else str(error)
        raise ConfigError(f"{protocol}:// needs a package that is not installed.", hint=f"{install}.") from error


def _open(uri: str, protocol: str, options: Mapping[str, Any]) -> tuple[Any, str]:
    """The file system and its name of `uri`."""
    import fsspec.config
    import fsspec.core

    if protocol not in _GCS:
        found: tuple[Any, str] = fsspec.core.url_to_fs(uri, **options)
        return found
    # Not gcsfs's default class, see `_check_protocol`; some other code may have imported it first.
    from gcsfs.core import GCSFileSystem

    configured = any("requests_timeout" in fsspec.config.conf.get(name, {}) for name in _GCS)
    # Left alone it would wait for ever for a server that says nothing.
    limit = {} if configured else {"requests_timeout": _REQUEST_S}
    return GCSFileSystem(**{**limit, **options}), uri.split("://", 1)[1]


def _fresh(fs: Any, path: str) -> Mapping[str, Any]:
    fs.invalidate_cache(path)
    found: Mapping[str, Any] = fs.info(path)
    return found


def _info(key: str, entry: Mapping[str, Any]) -> ObjectInfo:
    modified = entry.get("mtime", entry.get("LastModified", entry.get("last_modified")))
    if hasattr(modified, "timestamp"):
        modified = modified.timestamp()
    return ObjectInfo(key, int(entry.get("size") or 0), float(modified) if isinstance(modified, (int, float)) else None)
