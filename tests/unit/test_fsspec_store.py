"""What backends do to a store: lost replies, ignored conditions, writes that break off, secrets in errors."""

from __future__ import annotations

import asyncio
import errno
import logging
import traceback
import uuid
from collections.abc import Callable
from typing import Any, Literal

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from spot_core import (
    AccessError,
    ConfigError,
    Depth,
    KeyExistsError,
    KeyMissingError,
    Reason,
    Run,
    StoreError,
    TransientStoreError,
)
from spot_core.store import BytesSource, FsspecStore, put_once
from spot_core.store import _fsspec as module
from spot_core.store._backend_errors import translate_backend
from spot_core.writer import WriterClient


class Bucket(MemoryFileSystem):
    """An object store with a conditional put, and a hook before and after each request."""

    protocol = "spottest"
    store: dict[str, Any] = {}  # noqa: RUF012 - fsspec's own way of sharing state between instances
    pseudo_dirs = [""]  # noqa: RUF012
    honest = True
    before: Callable[[str, str], None] | None = None
    after: Callable[[str, str], None] | None = None
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return "/" + path.removeprefix("spottest://").strip("/")

    def _around(self, verb: str, path: str, action: Callable[[], Any]) -> Any:
        if type(self).before is not None:
            type(self).before(verb, path)
        result = action()
        if type(self).after is not None:
            type(self).after(verb, path)
        return result

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        mode = mode if self.honest else "overwrite"
        self._around("put", path, lambda: super(Bucket, self).pipe_file(path, value, mode=mode))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        return bytes(self._around("get", path, lambda: super(Bucket, self).cat_file(path, start, end)))

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        return self._around("list", path, lambda: super(Bucket, self).ls(path, detail))

    def info(self, path: str, **kwargs: Any) -> Any:
        return self._around("info", path, lambda: super(Bucket, self).info(path))


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch) -> Callable[..., FsspecStore]:
    fsspec.register_implementation("spottest", Bucket, clobber=True)
    monkeypatch.setattr(module, "_CONDITIONAL", {"spottest"})
    monkeypatch.setattr(module, "_FLAT", {"spottest"})
    for name, value in (("honest", True), ("before", None), ("after", None)):
        monkeypatch.setattr(Bucket, name, value)
    uri = f"spottest://{uuid.uuid4().hex}/run"
    return lambda retry_s=5.0, **options: FsspecStore(uri, storage_options=options, retry_s=retry_s)


def once(verb: str, error: Exception) -> Callable[[str, str], None]:
    left = [error]

    def hook(this: str, path: str) -> None:
        if this == verb and left:
            raise left.pop()

    return staticmethod(hook)  # type: ignore[return-value]


def always(verb: str, error: Exception) -> Callable[[str, str], None]:
    def hook(this: str, path: str) -> None:
        if this == verb:
            raise error

    return staticmethod(hook)  # type: ignore[return-value]


def test_the_probe_believes_an_honest_server(make: Callable[..., FsspecStore]) -> None:
    store = make()
    assert store.capabilities.put_if_absent
    assert store.capabilities.reopenable
    assert list(store.list("")) == [], "the probe cleans up"


def test_the_probe_sees_through_a_server_that_ignores_the_condition(make: Callable[..., FsspecStore]) -> None:
    Bucket.honest = False
    store = make()
    assert not store.capabilities.put_if_absent
    store.put_if_absent("a", b"1")
    with pytest.raises(KeyExistsError):
        store.put_if_absent("a", b"2")
    assert store.get("a") == b"1", "the simple way still does not overwrite"


def test_without_put_if_absent_attempts_have_names_by_chance(
    make: Callable[..., FsspecStore], caplog: pytest.LogCaptureFixture
) -> None:
    """Two processes may hold one life: their data must not meet."""
    Bucket.honest = False
    run = Run.open(make())
    writer = run.claim()
    assert "has no put-if-absent" in caplog.text
    ids = {writer.begin(1).write_id for _ in range(20)}
    assert len(ids) == 20
    assert all(len(write_id) == 16 for write_id in ids)
    opened = writer.begin(1)
    opened.seal([opened.write(0, {"w": b"1"})], world_size=1).commit({})
    verified = run.select(Depth.DIGESTS).verified
    assert verified is not None
    assert verified.read("w") == b"1"


def test_opening_and_looking_do_not_probe(make: Callable[..., FsspecStore]) -> None:
    asked: list[str] = []
    Bucket.before = staticmethod(lambda verb, path: asked.append(verb))
    run = Run.open(make())
    assert asked == []
    assert run.select(Depth.DIGESTS).verified is None
    assert set(asked) == {"get", "list"}


@pytest.mark.parametrize("mode", ["process", "thread"])
def test_a_writer_that_starts_does_not_probe(
    make: Callable[..., FsspecStore], mode: Literal["process", "thread"]
) -> None:
    """Every rank starts one; only the one that claims needs to know."""
    asked: list[str] = []
    Bucket.before = staticmethod(lambda verb, path: asked.append(verb))
    client = WriterClient.start(make(), mode=mode)
    assert client.mode == mode
    client.close()
    assert asked == []


def test_a_lost_reply_of_a_conditional_put_is_success(make: Callable[..., FsspecStore]) -> None:
    Bucket.after = once("put", ConnectionResetError("reset"))
    store = make()
    put_once(store, "a", b"mine")
    assert store.get("a") == b"mine"


def test_a_lost_reply_does_not_hide_anothers_object(make: Callable[..., FsspecStore]) -> None:
    store = make()
    store.put_if_absent("a", b"theirs")
    Bucket.before = once("put", ConnectionResetError("reset"))
    with pytest.raises(KeyExistsError):
        put_once(store, "a", b"mine")


def test_a_conflict_with_oneself_is_settled_by_put_once(make: Callable[..., FsspecStore]) -> None:
    """The client library repeats the request by itself, and reports the conflict with its own object."""
    store = make()
    Bucket.after = once("put", FileExistsError("a"))
    put_once(store, "a", b"nonce")
    assert store.get("a") == b"nonce"


@pytest.mark.parametrize("verb", ["get", "list", "info"])
def test_transient_errors_are_tried_again_until_the_deadline(make: Callable[..., FsspecStore], verb: str) -> None:
    store = make()
    store.put_if_absent("a/b", b"1")
    read = {"get": lambda: store.get("a/b"), "list": lambda: store.list("a/"), "info": lambda: store.stat("a/b")}[verb]
    Bucket.before = once(verb, TimeoutError("slow"))
    assert read()
    Bucket.before = always(verb, TimeoutError("slow"))
    store = make(retry_s=0.3)
    with pytest.raises(TransientStoreError):
        {"get": lambda: store.get("a/b"), "list": lambda: store.list("a/"), "info": lambda: store.stat("a/b")}[verb]()


@pytest.mark.parametrize("error", [PermissionError("403"), OSError(errno.EIO, "io"), RuntimeError("odd")])
def test_an_error_of_a_listing_is_not_emptiness(make: Callable[..., FsspecStore], error: Exception) -> None:
    """fsspec's own find() and walk() answer as if there were nothing."""
    Bucket.before = always("list", error)
    store = make()
    with pytest.raises(StoreError):
        store.list("generations/")
    with pytest.raises(StoreError):
        store.list_dirs("generations/")
    with pytest.raises(StoreError):
        Run.open(store).select(Depth.MARKER)


class Buffered(fsspec.spec.AbstractBufferedFile):
    """As s3fs and gcsfs write: closing publishes, and so does garbage collection."""

    published: list[bytes] = []  # noqa: RUF012
    fail_at = 10**9

    def _initiate_upload(self) -> None:
        self.taken = b""

    def _upload_chunk(self, final: bool = False) -> bool:
        self.taken += self.buffer.getvalue()
        if len(self.taken) >= self.fail_at:
            raise ConnectionResetError("reset")
        if final and self.autocommit:
            self.commit()
        return True

    def commit(self) -> None:
        self.published.append(self.taken)

    def discard(self) -> None:
        self.taken = b""


def test_a_write_that_breaks_off_publishes_nothing(
    make: Callable[..., FsspecStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not by leaving the block, and not when the file object is collected."""
    files: list[Buffered] = []

    def opening(self: Bucket, path: str, mode: str = "rb", **kwargs: Any) -> Buffered:
        files.append(Buffered(self, path, mode=mode, block_size=4096, autocommit=kwargs["autocommit"]))
        return files[-1]

    monkeypatch.setattr(Bucket, "open", opening)
    monkeypatch.setattr(Buffered, "published", [])
    monkeypatch.setattr(Buffered, "fail_at", 3 * 4096)
    with pytest.raises(TransientStoreError):
        make(retry_s=0.2).put_blob("b", BytesSource(bytes(5 * 4096), 4096))
    for file in files:
        file.__del__()
    files.clear()
    assert Buffered.published == []
    monkeypatch.setattr(Buffered, "fail_at", 10**9)
    monkeypatch.setattr(Bucket, "info", lambda self, path: {"type": "file", "name": path, "size": 5 * 4096})
    make().put_blob("b", BytesSource(bytes(5 * 4096), 4096))
    assert Buffered.published == [bytes(5 * 4096)]


SECRET = "hunter2-hunter2"


def test_secrets_are_shown_nowhere(make: Callable[..., FsspecStore], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store = make(retry_s=0.2, client={"headers": [f"Bearer {SECRET}"]}, password=SECRET)
    Bucket.before = always("get", PermissionError(f"denied for {SECRET}"))
    with pytest.raises(AccessError) as caught:
        store.get("a")
    told = "".join(traceback.format_exception(caught.value))
    assert "denied for ***" in told
    run = Run.open(store)
    assert SECRET not in told + repr(store) + str(store) + repr(run) + caplog.text


def test_options_reach_the_backend_untouched(make: Callable[..., FsspecStore]) -> None:
    nested = {"client_kwargs": {"endpoint_url": "http://x"}, "anon": True}
    store = make(**nested)
    store.put("a", b"1")
    assert store.storage_options == nested
    assert store._opened is not None
    assert store._opened[0].options == nested


def test_options_that_the_backend_refuses_are_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(uri: str, **options: Any) -> None:
        raise TypeError(f"unexpected keyword argument 'passwort' ({SECRET})")

    monkeypatch.setattr(fsspec.core, "url_to_fs", refuse)
    with pytest.raises(ConfigError, match="passwort") as caught:
        FsspecStore("memory://x/y", storage_options={"passwort": SECRET}).get("a")
    assert SECRET not in "".join(traceback.format_exception(caught.value))


class Response(OSError):
    """As s3fs raises: an OSError whose cause carries the server's answer."""

    def __init__(self, code: str, status: int) -> None:
        super().__init__(errno.EINVAL, code)
        self.__cause__ = Exception(code)
        self.__cause__.response = {  # type: ignore[attr-defined]
            "Error": {"Code": code},
            "ResponseMetadata": {"HTTPStatusCode": status},
        }


class Http(Exception):
    """As gcsfs raises."""

    def __init__(self, code: object) -> None:
        super().__init__(f"HTTP {code}")
        self.code = code


def named(name: str) -> Exception:
    *path, cls = name.split(".")
    return type(cls, (Exception,), {"__module__": ".".join(path)})("odd")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("error", "cls"),
    [
        (FileNotFoundError("a"), KeyMissingError),
        (FileExistsError("a"), KeyExistsError),
        (PermissionError("a"), AccessError),
        (OSError(errno.ENOSPC, "full"), StoreError),
        (OSError(errno.EREMOTEIO, "InternalError"), TransientStoreError),
        (OSError("words only"), StoreError),
        (TimeoutError(), TransientStoreError),
        (asyncio.TimeoutError(), TransientStoreError),
        (ConnectionRefusedError(errno.ECONNREFUSED, "refused"), TransientStoreError),
        (BrokenPipeError(), TransientStoreError),
        (Response("PreconditionFailed", 412), KeyExistsError),
        (Response("ConditionalRequestConflict", 409), TransientStoreError),
        (Response("SlowDown", 503), TransientStoreError),
        (Response("InvalidRange", 416), StoreError),
        (Response("AccessDenied", 403), AccessError),
        (Http(412), KeyExistsError),
        (Http("429"), TransientStoreError),
        (Http(500), TransientStoreError),
        (Http(401), AccessError),
        (Http(404), KeyMissingError),
        (Http(400), StoreError),
        (Http(None), StoreError),
        (named("botocore.exceptions.HTTPClientError"), TransientStoreError),
        (named("botocore.exceptions.NoCredentialsError"), AccessError),
        (named("aiohttp.client_exceptions.ClientError"), TransientStoreError),
        (named("google.auth.exceptions.GoogleAuthError"), AccessError),
        (named("azure.core.exceptions.ServiceRequestError"), TransientStoreError),
        (KeyError("odd"), StoreError),
    ],
    ids=lambda value: value.__name__ if isinstance(value, type) else repr(value)[:40],
)
def test_backend_errors_by_what_to_do(error: Exception, cls: type[StoreError]) -> None:
    found = translate_backend(error, "read", "k", "s3://b/run", str(error))
    assert type(found) is cls
    assert "k at s3://b/run" in str(found)


def test_gcsfs_says_403_by_its_text_alone() -> None:
    found = translate_backend(OSError("Forbidden: http://x\nno"), "put", "k", "gs://b/r", "Forbidden: http://x\nno")
    assert isinstance(found, AccessError)


def test_no_space_keeps_its_reason() -> None:
    found = translate_backend(OSError(errno.ENOSPC, "full"), "write", "k", "x://b", "full")
    assert found.reason is Reason.NO_SPACE


def test_gcs_gives_up_a_request_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """gcsfs alone would wait for ever for a server that says nothing."""
    pytest.importorskip("gcsfs")
    from fsspec.config import conf

    anonymous = {"token": "anon", "endpoint_url": "http://127.0.0.1:1"}
    assert FsspecStore("gs://bucket/run", storage_options=anonymous)._fs().requests_timeout == 120
    own = {**anonymous, "requests_timeout": 7}
    assert FsspecStore("gs://bucket/run", storage_options=own)._fs().requests_timeout == 7
    monkeypatch.setitem(conf, "gcs", {"requests_timeout": 8})
    assert FsspecStore("gs://bucket/run2", storage_options=anonymous)._fs().requests_timeout == 8
    # Whatever class gcsfs took for its default when somebody imported it, this one asks no other service first.
    assert type(FsspecStore("gs://bucket/run", storage_options=own)._fs()).__module__ == "gcsfs.core"
