"""What a start tries, the local tier in front, and `spot doctor`, against real servers as a user names them."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from spot_core import Depth, Run
from spot_core.cli import app
from spot_core.config import Settings
from spot_core.errors import AccessError
from spot_core.pytorch.session import Session
from spot_core.store import CloudStore, open_store
from tests.faults.lanes import some
from tests.faults.proxy import Answer, Proxy
from tests.session.job import Training, control, save, train
from tests.stores.servers import Server

SERVERS = some(["moto", "seaweedfs", "rclone", "azurite", "fake-gcs"], "moto")
CHECKS = ["look", "write", "write once", "read", "list", "clock", "speed", "delete"]


@pytest.fixture(params=SERVERS)
def server(request: pytest.FixtureRequest, server_named: Callable[[str], Server]) -> Server:
    return server_named(request.param)


def session_of(server: Server, run: str, **settings: object) -> Session:
    options = {"sources": "none", "interval": "2 steps", "storage_options": dict(server.options), **settings}
    made = Settings(**options)  # type: ignore[arg-type]
    return Session(Run.open(server.uri(run), storage_options=made.storage_options), made)


def begun(session: Session) -> tuple[Training, str | None]:
    torch.set_num_threads(1)
    training = Training()
    resumed = session.resume()
    training.take_up(resumed)
    session.start(state_bytes=1 << 20)
    return training, None if resumed is None else resumed.generation


def test_a_run_with_a_local_tier(
    server: Server, run_name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Preflight, saves that are committed locally and drained, a resume from either tier; bit-equal at the end."""
    local = str(tmp_path / "nvme")
    with session_of(server, run_name, local=local) as session:
        training, _ = begun(session)
        train(session, training, 4)
        save(session, training, wait=True)
        session.drain()
    table = next(message for message in caplog.messages if "spot: preflight of" in message)
    rows = [line.split("  ")[0].strip() for line in table.splitlines()[1:]]
    assert rows == [*CHECKS, "local tier", "memory", "durable"]
    assert "FAULT" not in table
    assert table.count("WARN") + table.count("warn") == (0 if server.conditional else 1), table
    assert "MB/s by one writer" in table
    assert all(str(server.options.get(name, "-no-")) not in caplog.text for name in ("secret", "account_key"))
    run = Run.open(open_store(server.uri(run_name), storage_options=server.options))
    found = run.discover().generations
    assert found[0].id.step == 4
    for committed in found:
        run.verify(committed, Depth.DIGESTS)
    assert not [info.key for info in run.store.list("probes/")]
    for blob in (tmp_path / "nvme").glob("*/generations/*/*.blob"):
        blob.unlink()  # a machine that is gone: the store decides
    with session_of(server, run_name, local=local) as session:
        training, came = begun(session)
        assert came == found[0].id.name
        assert training.step == 4
        train(session, training, 7)
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), control(7), strict=True))


def test_doctor_by_hand_and_a_permission_that_is_missing(
    server: Server, run_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The storage options come by the variable, and are not shown."""
    uri = server.uri(run_name)

    def doctor(options: object) -> tuple[int, dict[str, dict[str, object]], str]:
        monkeypatch.setenv("SPOT_STORAGE_OPTIONS", json.dumps(options))
        done = CliRunner().invoke(app, ["doctor", uri, "--json", "--state-gb", "0.1"])
        return done.exit_code, {item["check"]: item for item in json.loads(done.stdout)["findings"]}, done.output

    code, found, _ = doctor(dict(server.options))
    assert code == 0, found
    assert set(CHECKS) <= set(found)
    with Proxy(server.port) as proxy:
        proxy.fault = lambda request: Answer(403, "AccessDenied") if request.deletes else None
        code, found, text = doctor(dict(server.behind(proxy.port).options))
    assert code == 5
    assert [name for name, item in found.items() if not item["ok"]] == ["delete"]
    told = {"s3": "grant s3:DeleteObject", "gs": "grant storage.objects.delete", "az": "Storage Blob Data Contributor"}
    assert told[server.scheme] in str(found["delete"]["detail"])
    assert all(str(server.options.get(name, "-no-")) not in text for name in ("secret", "account_key"))


def test_a_permission_that_is_missing_stops_before_the_first_step(
    server: Server, run_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR)
    with Proxy(server.port) as proxy:
        proxy.fault = lambda request: Answer(403, "AccessDenied") if request.writes else None
        with session_of(server.behind(proxy.port), run_name) as session, pytest.raises(AccessError, match="write: "):
            session.resume()
    assert list(open_store(server.uri(run_name), storage_options=server.options).list("")) == []


@pytest.mark.slow
def test_a_real_identity_that_may_only_read(server_named: Callable[[str], Server], run_name: str) -> None:
    server = server_named("seaweedfs")
    options = {**server.options, "key": "spot-reader", "secret": "spot-reader-secret"}
    store = CloudStore(server.uri(run_name), storage_options=options)
    settings = Settings(sources="none", storage_options=options)
    with Session(Run.open(store), settings) as session, pytest.raises(AccessError) as caught:
        session.resume()
    assert "grant s3:PutObject" in caught.value.message
    assert "nothing was started" in caught.value.message
