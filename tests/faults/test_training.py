"""A training whose store is behind a network that fails: it goes on, says so, and the next good save commits.

Mutants that these tests are there to catch: a failed upload committed all the same; an error while looking taken for an
empty run; a save without a deadline.
"""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest
import torch

from spot_core import Depth
from spot_core.config import Settings
from spot_core.errors import AccessError, FencedError, Reason, StoreError, TransientStoreError
from spot_core.pytorch.session import Patience, Session
from spot_core.run import Run
from spot_core.store import Store, open_store
from spot_core.writer.meter import Metered
from tests.faults.lanes import some
from tests.faults.proxy import Answer, Fault, LoseReply, Proxy, Request, Reset, Stale, Stall, Truncate
from tests.faults.through import expired, impatient, opened
from tests.session.job import Training, save, train
from tests.stores.servers import Server, free_port


class Big(Training):
    """With a state of some 20 MB, so that an upload has several parts."""

    def __init__(self) -> None:
        super().__init__()
        self.ballast = torch.zeros(5_000_000)

    def update(self) -> None:
        super().update()
        self.ballast += self.step

    def shared(self) -> dict[str, Any]:
        return {**super().shared(), "ballast": self.ballast}

    def take_up(self, resumed: Any) -> None:
        super().take_up(resumed)
        if resumed is not None:
            self.ballast.copy_(resumed.state.shared["ballast"])

    def tensors(self) -> list[torch.Tensor]:
        return [*super().tensors(), self.ballast]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=some(["moto", "seaweedfs", "azurite", "fake-gcs"], "moto"))
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


@pytest.fixture
def proxy(server: Server) -> Iterator[Proxy]:
    with Proxy(server.port) as made:
        yield made


@pytest.fixture
def behind(server: Server, proxy: Proxy, run_name: str) -> Callable[..., Store]:
    """Opens the run through the proxy."""
    return lambda retry_s=3.0: opened(server.behind(proxy.port), run_name, retry_s)


def session_of(store: Store, *, patience: Patience | None = None, **settings: Any) -> Session:
    # Without the preflight, which would meet the faults first.
    base = {"sources": "none", "interval": "2 steps", "writer": "thread", "max_failed_saves": 10, "preflight": False}
    settings = {**base, **settings}
    return Session(Run.open(store), Settings(**settings), patience=patience or Patience(close_s=30))


def begun(session: Session) -> Big:
    training = Big()
    training.take_up(session.resume())
    session.start()
    return training


def control(steps: int) -> list[torch.Tensor]:
    training = Big()
    while training.step < steps:
        training.forward_backward()
        training.update()
    return training.tensors()


def whole(server: Server, store: Store) -> list[int]:
    """Steps of the generations as somebody sees them who does not come through the proxy; each is read to its end."""
    run = Run.open(open_store(store.uri, storage_options=server.options))
    found = run.discover().generations
    for committed in found:
        run.verify(committed, Depth.DIGESTS)
    return [committed.id.step for committed in found]


def secrets_of(server: Server) -> list[str]:
    return [str(value) for name, value in server.options.items() if name in ("key", "secret", "account_key")]


def is_data(request: Request) -> bool:
    return request.is_part or (request.writes and "-r00000" in request.key)


def first(count: int, fault: Fault, which: Callable[[Request], bool]) -> Callable[[Request], Fault | None]:
    seen = itertools.count()
    return lambda request: fault if which(request) and next(seen) < count else None


PASSING: dict[str, tuple[int, Fault, Callable[[Request], bool]]] = {
    "reset in the middle of an upload": (2, Reset(), is_data),
    "burst of 500": (4, Answer(500, "InternalError"), lambda request: request.writes),
    "burst of 503": (4, Answer(503, "ServiceUnavailable"), lambda request: True),
    "throttled": (4, Answer(503, "SlowDown"), lambda request: True),
    "reply lost of data": (2, LoseReply(), is_data),
    "reply lost of the marker": (1, LoseReply(), lambda request: request.writes and "COMMIT" in request.key),
    "stall": (2, Stall(10.0), lambda request: request.writes),
    "stale listing": (1000, Stale(), lambda request: request.is_listing),
}


@pytest.mark.parametrize("kind", some(PASSING, "reset in the middle of an upload", "reply lost of the marker"))
def test_what_passes_costs_no_save(
    server: Server, proxy: Proxy, behind: Callable[..., Store], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    # Some servers hang up while nothing moves, and it has to be sent again: by default there is time for that.
    with session_of(behind(40.0 if kind == "stall" else 3.0)) as session:
        training = begun(session)
        met: list[Request] = []
        count, fault, which = PASSING[kind]
        rule = first(count, fault, which)

        def observed(request: Request) -> Fault | None:
            found = rule(request)
            if found is not None:
                met.append(request)
            return found

        proxy.fault = observed
        for _ in range(2):
            train(session, training, training.step + 1)
            save(session, training, wait=True)
        assert met, "the fault was never met"
    assert "failed" not in caplog.text
    assert whole(server, behind()) == [2, 1]
    proxy.fault = lambda request: None
    with session_of(behind()) as session:
        resumed = begun(session)
        assert resumed.step == 2
        train(session, resumed, 5)
    assert all(torch.equal(a, b) for a, b in zip(resumed.tensors(), control(5), strict=True))


@pytest.mark.slow
def test_a_store_slower_than_the_interval_is_said_with_an_interval_that_holds(
    behind: Callable[..., Store], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """20 MB at 8 MB/s: two chunks of 8 MiB have to be over before the last one goes."""
    caplog.set_level(logging.INFO)
    monkeypatch.setitem(Metered.__init__.__kwdefaults__, "every_s", 0.5)
    with session_of(behind(60.0), interval="0.2s", max_upload_mb_s=8.0) as session:
        training = begun(session)

        def said() -> list[int]:
            found = (re.search(r"An interval of (\d+) s or more would hold", text) for text in caplog.messages)
            return [int(match[1]) for match in found if match]

        while len(said()) < 2:
            train(session, training, training.step + 20)
        session.drain()
    # The second time an upload has been measured from its beginning to its end.
    assert said()[1] >= 2
    progress = [text for text in caplog.messages if "are on their way to" in text]
    told = r"spot: \d+ of 20 MB are on their way to .* after \d+ s \(\d+ MB/s, about \d+ s left\)"
    assert progress
    assert all(re.fullmatch(told, text) for text in progress)


LASTING: dict[str, Callable[[Server], Fault]] = {
    "outage": lambda server: Answer(503, "ServiceUnavailable"),
    "resets": lambda server: Reset(),
    "expired credentials": expired,
    "access lost": lambda server: Answer(403, "AccessDenied"),
}


@pytest.mark.parametrize("kind", some(LASTING, "outage", "expired credentials"))
def test_what_lasts_costs_saves_and_no_training(
    server: Server, proxy: Proxy, behind: Callable[..., Store], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Training goes on to its end; the alarm says why; when the store is back, the next save commits."""
    store = behind(0.5)
    caplog.set_level(logging.WARNING)
    with session_of(store) as session:
        training = begun(session)

        def after(step: int) -> None:
            if step == 3:
                session.drain()
                proxy.fault = lambda request: LASTING[kind](server) if request.writes else None
            if step == 7:
                session.drain()  # what fails, fails before the store is back
                proxy.fault = lambda request: None

        train(session, training, 10, after)
        committed = session.drain()
        assert committed is not None
        assert committed.id.step == 10
    alarms = [message for message in caplog.messages if "the save of step 4 failed" in message]
    assert len(alarms) == 1
    if kind in ("expired credentials", "access lost"):
        assert "Check the credentials" in alarms[0]
    assert not any(secret in caplog.text for secret in secrets_of(server))
    assert whole(server, store) == [10, 8, 2]
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), control(10), strict=True))


def test_a_store_that_hangs_holds_no_rank_up_for_ever(
    server: Server, proxy: Proxy, behind: Callable[..., Store], caplog: pytest.LogCaptureFixture
) -> None:
    """The save is given up after its deadline, and training, which waited for it before the next one, goes on."""
    with session_of(behind(), patience=Patience(write_s=1.5, close_s=1)) as session:
        training = begun(session)
        train(session, training, 3)
        session.drain()
        proxy.fault = lambda request: Stall(60.0) if is_data(request) else None
        save(session, training)
        training.step += 1
        proxy.fault = lambda request: Stall(60.0) if is_data(request) and "00003/" in request.key else None
        save(session, training, wait=True)
    assert "the save of step 3 failed" in caplog.text
    assert "did not finish writing within" in caplog.text
    assert whole(server, behind()) == [4, 2]


def test_a_download_that_breaks_off_is_read_again(
    server: Server, proxy: Proxy, behind: Callable[..., Store]
) -> None:
    with session_of(behind()) as session:
        train(session, begun(session), 3)
        session.drain()
    proxy.fault = first(3, Truncate(), lambda request: request.method == "GET" and ".blob" in request.key)
    with session_of(behind()) as session:
        assert begun(session).step == 2
    assert sum(".blob" in request.key and request.method == "GET" for request in proxy.requests) >= 6


LOOKING: dict[str, tuple[Fault, type[StoreError]]] = {
    "forbidden": (Answer(403, "AccessDenied"), AccessError),
    "time-out": (Stall(30.0), TransientStoreError),
    "outage": (Answer(500, "InternalError"), TransientStoreError),
}


@pytest.mark.parametrize("kind", LOOKING)
@pytest.mark.parametrize("what", ["everything", "listings"])
def test_an_error_while_looking_refuses_a_fresh_start(
    server: Server, proxy: Proxy, run_name: str, kind: str, what: str
) -> None:
    """A run with a generation in it, and one that is empty: in neither case is it known to be empty."""
    fault, error = LOOKING[kind]
    proxy.fault = lambda request: fault if what == "everything" or request.is_listing else None
    store = opened(server.behind(proxy.port), run_name, 0.5, **impatient(server, 0.5))
    with session_of(store) as session, pytest.raises(error):
        session.resume()
    assert list(open_store(server.uri(run_name), storage_options=server.options).list("")) == []


def test_a_name_that_does_not_resolve_refuses_a_fresh_start(server: Server, run_name: str) -> None:
    store = opened(server.behind(80, "no-such-host.invalid"), run_name, 0.5)
    with session_of(store) as session, pytest.raises(TransientStoreError):
        session.resume()


@pytest.mark.parametrize("preflight", [True, False])
def test_a_server_that_is_gone_refuses_a_fresh_start(server: Server, run_name: str, preflight: bool) -> None:
    store = opened(server.behind(free_port()), run_name, 0.5)
    with session_of(store, preflight=preflight) as session, pytest.raises(StoreError) as caught:
        session.resume()
    assert caught.value.reason is Reason.TRANSIENT


def run_on(session: Session, training: Big) -> None:
    """Far ahead by steps."""
    train(session, training, 20)
    session.drain()


def test_the_older_of_two_lives_stops(server: Server, proxy: Proxy, behind: Callable[..., Store]) -> None:
    """A node that was written off and is not dead: its next save is refused, and only the newer life's count."""
    with session_of(behind()) as zombie:
        old = begun(zombie)
        train(zombie, old, 3)
        zombie.drain()
        with session_of(behind()) as heir:
            new = begun(heir)
            assert new.step == 2
            train(heir, new, 5)
            heir.drain()
            with pytest.raises(FencedError):
                run_on(zombie, old)
    found = Run.open(open_store(behind().uri, storage_options=server.options)).discover().generations
    assert [(committed.id.life, committed.id.step) for committed in found] == [(2, 4), (1, 2)]


def test_no_secret_is_in_any_object_log_or_process_list(
    server: Server, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="spot_core")
    store = opened(server, run_name, 60)
    with session_of(store, writer="process", preflight=True) as session:
        training = begun(session)
        train(session, training, 2)
        save(session, training, wait=True)
        children = psutil.Process().children(recursive=True)
        shown = [word for child in children for word in (*child.cmdline(), *child.environ().values())]
        assert shown
        session.stop(training.step, "told to")
    objects = [store.get(info.key) for info in store.list("")]
    assert len(objects) >= 6
    for secret in secrets_of(server):
        assert not any(secret.encode() in data for data in objects)
        assert secret not in caplog.text
        assert not any(secret in word for word in shown)
