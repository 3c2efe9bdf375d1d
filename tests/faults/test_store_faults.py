"""What a network does to single requests: carried out once, told rightly, never half.

Mutants that these tests are there to catch: no retry around a conditional put; no read-back after a lost reply; a
transient error of a listing told as emptiness; reads that are not tried again when their body breaks off.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import pytest

from spot_core import Depth, Run
from spot_core.errors import AccessError, CorruptShardError, KeyExistsError, StoreError, TransientStoreError
from spot_core.store import BytesSource, CloudStore, Store, _gcs_parts, put_once
from tests.faults.lanes import some
from tests.faults.proxy import Answer, Corrupt, Fault, LoseReply, Proxy, Request, Reset, Stall, Truncate
from tests.faults.through import expired, impatient, opened
from tests.stores.servers import Server

SLOW_DOWN = Answer(503, "SlowDown", "Please reduce your request rate.")
DATA = bytes(range(251)) * 100_000  # 25 MB: two parts


@pytest.fixture(params=some(["moto", "seaweedfs", "azurite", "fake-gcs"], "moto"))
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


@pytest.fixture
def store(server: Server, proxy: Proxy, run_name: str) -> Store:
    """With a deadline that a burst outlives only where it is meant to."""
    return opened(server.behind(proxy.port), run_name, 10)


def first(count: int, fault: Fault, which: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    """`fault` for the first `count` requests of a kind."""
    seen = itertools.count()
    return lambda request: fault if which(request) and next(seen) < count else None


BURSTS = {
    "reset": Reset(),
    "500": Answer(500, "InternalError"),
    "503": Answer(503, "ServiceUnavailable"),
    "slow down": SLOW_DOWN,
    "lost reply": LoseReply(),
    "stall": Stall(1.0),
}


@pytest.mark.parametrize("kind", some(BURSTS, "reset", "slow down"))
def test_an_upload_comes_through(store: Store, proxy: Proxy, kind: str) -> None:
    proxy.fault = first(3, BURSTS[kind], lambda request: request.is_part)
    store.put_blob("g/blob", BytesSource(DATA))
    assert store.get("g/blob") == DATA
    assert [info.key for info in store.list("")] == ["g/blob"]
    parts = sum(request.is_part for request in proxy.requests)
    assert parts <= 3 if kind == "stall" else parts >= 4, "the fault was met, and only parts were sent again"


@pytest.mark.parametrize("kind", ["500", "lost reply"])
def test_the_end_of_an_upload_comes_through(
    store: Store, proxy: Proxy, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The request that makes the object visible may have been carried out when its reply is lost."""
    monkeypatch.setattr(_gcs_parts, "_PART", 8 << 20)  # on GCS, parts that are joined
    proxy.fault = first(1, BURSTS[kind], lambda request: request.makes_visible)
    store.put_blob("g/blob", BytesSource(DATA))
    assert store.get("g/blob") == DATA
    assert any(request.makes_visible for request in proxy.requests)


@pytest.mark.parametrize("kind", some(BURSTS, "reset", "lost reply"))
def test_a_conditional_put_is_done_once_and_known_for_ones_own(store: Store, proxy: Proxy, kind: str) -> None:
    proxy.fault = first(2, BURSTS[kind], lambda request: request.writes)
    put_once(store, "lives/1", b"nonce one")
    assert store.get("lives/1") == b"nonce one"
    assert sum(request.writes for request in proxy.requests) >= (1 if kind == "stall" else 3), "the fault was met"
    proxy.fault = first(1, BURSTS[kind], lambda request: request.writes)
    with pytest.raises(KeyExistsError):
        put_once(store, "lives/1", b"nonce two")
    assert store.get("lives/1") == b"nonce one"


@pytest.mark.parametrize("number", [1, 2])
def test_a_lost_reply_does_not_mislead_the_probe(store: Store, proxy: Proxy, number: int) -> None:
    """Whether the server heeds the condition: the object that is in the way is the probe's own."""
    seen = itertools.count(1)
    proxy.fault = lambda request: LoseReply() if request.writes and next(seen) == number else None
    assert store.capabilities.put_if_absent
    assert next(seen) > number
    assert list(store.list("")) == []


@pytest.mark.parametrize("kind", some(["reset", "503", "slow down", "lost reply", "truncated"], "reset", "truncated"))
def test_reading_comes_through(store: Store, proxy: Proxy, kind: str) -> None:
    store.put_blob("g/blob", BytesSource(DATA))
    fault = Truncate() if kind == "truncated" else BURSTS[kind]
    proxy.fault = first(2, fault, lambda request: request.method == "GET")
    assert store.get("g/blob") == DATA
    proxy.fault = first(2, fault, lambda request: request.method == "GET")
    buffer = bytearray(20_000_000)
    store.get_ranges("g/blob", [(1000, [memoryview(buffer)])])
    assert buffer == DATA[1000 : 1000 + len(buffer)]
    proxy.fault = first(2, fault, lambda request: request.method == "GET")
    assert [info.key for info in store.list("g/")] == ["g/blob"]
    proxy.fault = first(2, fault, lambda request: request.method == "GET")
    assert list(store.list_dirs("")) == ["g"]


def test_a_server_that_says_nothing_is_given_up(server: Server, proxy: Proxy, run_name: str) -> None:
    """Nobody waits for ever for a reply."""
    store = opened(server.behind(proxy.port), run_name, 0.5, **impatient(server, 0.3))
    proxy.fault = lambda request: Stall(60.0)
    asking: list[Callable[[], object]] = [lambda: store.get("a"), lambda: store.put("a", b"1"), lambda: store.list("")]
    for ask in asking:
        with pytest.raises(TransientStoreError):
            ask()


@pytest.mark.parametrize("what", ["forbidden", "expired", "broken"])
def test_an_error_is_never_told_as_an_absence(server: Server, proxy: Proxy, run_name: str, what: str) -> None:
    known = {"forbidden": Answer(403, "AccessDenied"), "broken": Answer(500, "Odd")}
    answer = known.get(what, expired(server))
    store = opened(server.behind(proxy.port), run_name, 0.3)
    proxy.fault = lambda request: answer
    kind = TransientStoreError if answer.status == 500 else AccessError
    asking: list[Callable[[], object]] = [
        lambda: store.get("a"),
        lambda: store.list(""),
        lambda: store.list_dirs(""),
        lambda: store.put("a", b"1"),
        lambda: store.put_blob("b", BytesSource(DATA)),
    ]
    for ask in asking:
        with pytest.raises(kind):
            ask()
    # They look first, and the reply to that has no body that could say more.
    for ask in (lambda: store.stat("a"), lambda: store.put_if_absent("a", b"1")):
        with pytest.raises(StoreError):
            ask()


def test_an_upload_that_is_given_up_leaves_no_object_and_no_parts(
    server: Server, proxy: Proxy, run_name: str
) -> None:
    store = opened(server.behind(proxy.port), run_name, 0.5)
    proxy.fault = lambda request: Answer(500, "InternalError") if request.is_part else None
    with pytest.raises(TransientStoreError):
        store.put_blob("g/blob", BytesSource(DATA))
    assert list(store.list("")) == []
    assert list(store.unfinished("")) == [], "the parts that did arrive are paid for until somebody aborts"


def test_a_bit_that_turns_on_the_way_is_found(store: Store, proxy: Proxy) -> None:
    """By nobody but us, where the payload is not signed and the wire is not encrypted, and no digest of it is told."""
    if store.uri.startswith("gs:"):
        pytest.skip("GCS tells its digest: see the next test")
    run = Run.open(store)
    writer = run.claim()
    for step in (1, 2):
        opened = writer.begin(step)
        if step == 2:
            proxy.fault = first(1, Corrupt(), lambda request: request.is_part)
        opened.seal([opened.write(0, {"w": DATA})], world_size=1).commit({})
    found = run.discover().generations
    assert [committed.id.step for committed in found] == [2, 1]
    with pytest.raises(CorruptShardError):
        run.verify(found[0], Depth.DIGESTS)
    verified = run.select(Depth.DIGESTS).verified
    assert verified is not None
    assert verified.committed.id.step == 1
    assert verified.read("w") == DATA


@pytest.mark.slow
def test_what_gcs_has_is_compared_with_what_was_sent(
    server_named: Callable[[str], Server], run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One stream, and parts side by side: the piece that changed on the way is sent again."""
    server = server_named("fake-gcs")
    with Proxy(server.port) as proxy:
        store = opened(server.behind(proxy.port), run_name, 10)
        for key in ("g/stream", "g/parts"):
            proxy.fault = first(1, Corrupt(), lambda request: request.is_part)
            store.put_blob(key, BytesSource(DATA))
            assert store.get(key) == DATA
            monkeypatch.setattr(_gcs_parts, "_PART", 8 << 20)
        assert [info.key for info in store.list("")] == ["g/parts", "g/stream"]
        assert sum(request.makes_visible for request in proxy.requests) == 1, "the parts were joined once"


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["sha256", "crc64nvme"])
def test_the_server_refuses_it_where_it_is_told_the_digest(
    server_named: Callable[[str], Server], run_name: str, algorithm: str
) -> None:
    """(A signed payload does not do it everywhere: SeaweedFS, for one, does not look at that digest.)"""
    server = server_named("seaweedfs")
    with Proxy(server.port) as proxy:
        options = {**server.behind(proxy.port).options, "checksum_algorithm": algorithm}
        store = CloudStore(server.uri(run_name), storage_options=options, retry_s=5)
        proxy.fault = first(1, Corrupt(), lambda request: request.is_part)
        with pytest.raises(TransientStoreError, match="BadDigest"):
            store.put_blob("g/blob", BytesSource(DATA))
        assert store.stat("g/blob") is None
        assert list(store.unfinished("")) == []
        store.put_blob("g/blob", BytesSource(DATA))
        assert store.get("g/blob") == DATA
        # What is small is sent again at once.
        proxy.fault = first(1, Corrupt(), lambda request: request.method == "PUT")
        put_once(store, "g/marker", b"nonce")
        assert store.get("g/marker") == b"nonce"


def test_secrets_are_in_no_error(server: Server, proxy: Proxy, run_name: str) -> None:
    """Servers repeat what they were sent: keys, signatures, tokens."""
    if server.scheme != "s3":
        pytest.skip("what is scrubbed does not depend on the server")
    secret = str(server.options["secret"])
    options = {**server.behind(proxy.port).options, "token": "session-token-qxzj"}
    store = CloudStore(server.uri(run_name), storage_options=options, retry_s=0.2)
    told = f"signed with {secret} and session-token-qxzj"
    for status, code in ((403, "SignatureDoesNotMatch"), (500, "InternalError"), (400, "Odd")):
        proxy.fault = lambda request, status=status, code=code: Answer(status, code, told)  # type: ignore[misc]
        with pytest.raises(StoreError) as caught:
            store.get("a")
        text = f"{caught.value}{caught.value!r}{caught.value.__cause__!r}{store!r}"
        assert "signed with ***" in text or status == 500
        assert secret not in text
        assert "qxzj" not in text
