"""S3 and what speaks its language, and Azure: parts sent from where they stand in memory, several at a time.

The client is obstore (Rust's object_store), which takes memory without a copy and sends it outside of the interpreter's
lock; s3fs and adlfs copy every part and send it from one event loop, at several times the cost (`tests/bench/stores`).
It repeats failed requests with backoff until `retry_s`. What it leaves to us: telling errors apart, the doubt after a
lost reply, taking back an upload that broke off, and finding those that dead writers left.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
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
from spot_core.store._base import (
    BlobSource,
    Capabilities,
    ObjectInfo,
    Unfinished,
    check_key,
    check_prefix,
    chunk_count,
)
from spot_core.store._cloud_errors import translate_cloud
from spot_core.store._cloud_options import Place, open_client, with_defaults
from spot_core.store._pieces import read_pieces, scatter
from spot_core.store._readback import put_once
from spot_core.store._s3_uploads import S3Uploads
from spot_core.store._secrets import scrub

__all__ = ["CloudStore"]

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_PART, _MAX_PARTS = 16 << 20, 9_000
"""Bytes per uploaded part, and how many parts an object may have (S3 allows 10,000)."""
_PARTS_AT_ONCE = 6
_AHEAD, _FEED_THREADS = 4, 2
"""Chunks of a source that are got ready before they are sent, and by how many threads."""


class CloudStore:
    """Objects below a prefix of a bucket or container.

    Args:
        uri: ``s3://bucket/run``, ``az://container/run``, ``abfss://container@account.dfs.core.windows.net/run``.
        storage_options: as for s3fs or adlfs. Shown nowhere.
        retry_s: seconds during which transient errors are tried again, per request.

    An upload holds at most the parts under way and one more, whatever the size of the object.
    """

    reopenable = True

    def __init__(self, uri: str, *, storage_options: Mapping[str, Any] | None = None, retry_s: float = 60.0) -> None:
        self.uri = uri.rstrip("/")
        self.storage_options: Mapping[str, Any] = dict(storage_options or {})
        self._place = Place.parse(self.uri)
        self._options = with_defaults(self._place, self.storage_options)
        self._retry_s = retry_s
        self._lock = threading.Lock()
        self._opened: Any = None
        self._conditional: bool | None = None
        _check_installed(self.uri, self._place)

    @property
    def capabilities(self) -> Capabilities:
        if self._conditional is None:
            self._conditional = self._probe()
        return Capabilities(put_if_absent=self._conditional, reopenable=self.reopenable)

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_key(key)
        # Where the store is not known to heed the condition (a helper process that writes names of its own never
        # probes) a look first refuses what is long taken; two writers at once may both pass it.
        if not self._conditional and self.stat(key) is not None:
            raise KeyExistsError(f"{key} exists at {self.uri}.")
        self._create(key, data, mode="overwrite" if self._conditional is False else "create")

    def _create(self, key: str, data: bytes, *, mode: str = "create") -> None:
        self._call("create", key, lambda api, client: api.put(client, key, data, mode=mode))

    def put(self, key: str, data: bytes) -> None:
        check_key(key)
        self._call("replace", key, lambda api, client: api.put(client, key, data, use_multipart=False))

    def put_blob(self, key: str, source: BlobSource) -> None:
        check_key(key)
        if chunk_count(source) <= 1:
            data = source.chunk(0) if source.size else b""
            self._call("write", key, lambda api, client: api.put(client, key, data, use_multipart=False))
            return
        feed = _Feed(source, part=_part_size(source))
        try:
            self._call(
                "write",
                key,
                lambda api, client: api.put(
                    client, key, iter(feed), chunk_size=feed.part, max_concurrency=_PARTS_AT_ONCE, use_multipart=True
                ),
                retry=False,  # a request that fails is repeated by the client; the whole of it would cost too much
            )
        except StoreError:
            if feed.error is not None:
                raise feed.error from None  # the source's own errors pass as they are
            if not self._arrived(key, source.size):
                raise
            _log.info("The reply for %s was lost; looked up, the object is there whole.", key)
        else:
            # The store's own account of what it has: its parts were counted and summed up there.
            if not self._arrived(key, source.size):
                raise StoreError(f"{key} at {self.uri} does not have the {source.size} bytes that were written.")

    def _arrived(self, key: str, size: int) -> bool:
        """An upload appears whole or not at all, and every attempt has a key of its own."""
        try:
            found = self.stat(key)
        except StoreError as error:
            _log.debug("Could not look up %s: %s", key, error)
            return False
        return found is not None and found.size == size

    def get(self, key: str) -> bytes:
        check_key(key)
        return self._call("read", key, lambda api, client: bytes(api.get(client, key).bytes()))

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        check_key(key)
        read_pieces(ranges, lambda offset, buffers: self._fill(key, offset, buffers), threads)

    def stat(self, key: str) -> ObjectInfo | None:
        check_key(key)
        try:
            return _info(self._call("stat", key, lambda api, client: api.head(client, key)))
        except KeyMissingError:
            return None

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        check_prefix(prefix)
        if recursive:
            found = self._listing(prefix, lambda api, client: _all(api.list(client, prefix or None)))
        else:
            found = self._level(prefix)["objects"]
        # An object that has the prefix's own name, but for the slash, is not below it.
        return sorted((_info(item) for item in found if item["path"].startswith(prefix)), key=lambda info: info.key)

    def list_dirs(self, prefix: str) -> Sequence[str]:
        check_prefix(prefix)
        return sorted(path.rstrip("/").rsplit("/", 1)[-1] for path in self._level(prefix)["common_prefixes"])

    def delete(self, key: str) -> None:
        check_key(key)
        try:
            self._call("delete", key, lambda api, client: api.delete(client, key))
        except KeyMissingError:
            pass

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        check_prefix(prefix)
        if self._place.kind != "s3":
            return ()
        with self._errors("list uploads of", prefix):
            return self._uploads().list(prefix)

    def abort(self, upload: Unfinished) -> None:
        check_key(upload.key)
        try:
            with self._errors("abort the upload of", upload.key):
                self._uploads().abort(upload)
        except KeyMissingError:
            pass

    def _uploads(self) -> S3Uploads:
        return S3Uploads(self._place, self._options)

    def _fill(self, key: str, offset: int, buffers: Sequence[memoryview]) -> None:
        size = sum(map(len, buffers))
        try:
            data = self._call(
                "read", key, lambda api, client: memoryview(api.get_range(client, key, start=offset, length=size))
            )
        except (KeyMissingError, AccessError, TransientStoreError):
            raise
        except StoreError as error:
            found = self.stat(key)
            if found is None:
                raise
            if found.size < offset + size:
                # A range that begins beyond the end is refused, in each store's own words.
                data = memoryview(b"")
            elif "non-partial" in error.message:
                # rclone serves a range under the status of a whole object, which the client takes for one.
                _log.warning("%s cannot serve a part of an object: all of %s is read for each part.", self.uri, key)
                data = memoryview(self.get(key))[offset : offset + size]
            else:
                raise
        if len(data) != size:
            raise StoreError(f"{key} at {self.uri} ends before byte {offset + size}.", reason=Reason.TRUNCATED)
        scatter(data, buffers)

    def _level(self, prefix: str) -> Mapping[str, Any]:
        found: Mapping[str, Any] = self._listing(
            prefix, lambda api, client: api.list_with_delimiter(client, prefix or None)
        )
        return found

    def _listing(self, prefix: str, look: Callable[[Any, Any], _T]) -> _T:
        try:
            return self._call("list", prefix, look)
        except KeyMissingError as error:
            # An empty prefix lists as empty. What is missing here is the bucket.
            raise StoreError(error.message, hint="Does the bucket exist?") from None

    def _probe(self) -> bool:
        """Whether a second conditional put really fails: some servers accept the condition and ignore it."""
        key = f".tmp-{secrets.token_hex(16)}"
        try:
            put_once(self, key, b"first")  # a reply may be lost here as anywhere
            try:
                self._create(key, b"second")
            except KeyExistsError:
                pass
            return self.get(key) == b"first"
        except (AccessError, TransientStoreError, KeyMissingError):
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

    def _call(self, verb: str, key: str, action: Callable[[Any, Any], _T], *, retry: bool = True) -> _T:
        def call() -> _T:
            with self._errors(verb, key):
                import obstore

                return action(obstore, self._client())

        return self._retry(call) if retry else call()

    def _retry(self, action: Callable[[], _T]) -> _T:
        """Around the client's own: it repeats neither a create whose reply was lost, nor a reply that broke off."""
        for attempt in stamina.retry_context(
            on=TransientStoreError, attempts=None, timeout=self._retry_s, wait_initial=0.1, wait_max=5.0
        ):
            with attempt:
                return action()
        raise AssertionError("unreachable: the last attempt returns or raises")

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except (StoreError, ConfigError):
            raise
        except Exception as error:  # noqa: BLE001 - the client raises anything; whatever it is comes out as StoreError
            why = scrub(str(error), self._options)
            # Without its cause, which prints what the server sent in full: requests, headers and all.
            raise translate_cloud(error, verb, key, self.uri, why) from None

    def _client(self) -> Any:
        with self._lock:
            if self._opened is None:
                try:
                    self._opened = open_client(self._place, self._options, retry_s=self._retry_s)
                except ConfigError:
                    raise
                except Exception as error:  # noqa: BLE001 - obstore and botocore each have their own
                    names = ", ".join(sorted(map(str, self._options)))
                    raise ConfigError(
                        f"The client of {self.uri} refuses its settings ({names or 'no storage_options'}): "
                        f"{scrub(str(error), self._options).splitlines()[0].rstrip('.')}."
                    ) from None
            return self._opened

    def __repr__(self) -> str:
        return f"CloudStore({self.uri!r})"


class _Feed:
    """A source's chunks one after the other; remembers what the source itself raised.

    A few are asked for ahead, by threads of their own: a source may digest a chunk on its way out, and the wire need
    not wait for that. It takes no memory, a chunk being where it is.
    """

    def __init__(self, source: BlobSource, *, part: int) -> None:
        self._source = source
        self.part = part
        self.error: Exception | None = None

    def __iter__(self) -> Iterator[memoryview]:
        ahead: deque[Future[memoryview]] = deque()
        with ThreadPoolExecutor(_FEED_THREADS, thread_name_prefix="spot-feed") as pool:
            try:
                for i in range(chunk_count(self._source)):
                    ahead.append(pool.submit(self._source.chunk, i))
                    if len(ahead) > _AHEAD:
                        yield self._next(ahead)
                while ahead:
                    yield self._next(ahead)
            finally:
                for future in ahead:
                    future.cancel()

    def _next(self, ahead: deque[Future[memoryview]]) -> memoryview:
        try:
            return ahead.popleft().result()
        except Exception as error:
            self.error = error
            raise


def _part_size(source: BlobSource) -> int:
    """A multiple of the chunk size, so that parts begin where chunks do."""
    least = max(_PART, -(-source.size // _MAX_PARTS))
    return -(-least // source.chunk_size) * source.chunk_size


def _all(stream: Any) -> list[Any]:
    return [item for batch in stream for item in batch]


def _info(item: Mapping[str, Any]) -> ObjectInfo:
    modified = item.get("last_modified")
    return ObjectInfo(str(item["path"]), int(item["size"]), None if modified is None else modified.timestamp())


def _check_installed(uri: str, place: Place) -> None:
    try:
        import obstore  # noqa: F401
    except ImportError as error:
        extra = "azure" if place.kind == "az" else "s3"
        raise ConfigError(
            f"{uri} needs a package that is not installed.", hint=f"pip install 'lightning-spot[{extra}]'."
        ) from error
