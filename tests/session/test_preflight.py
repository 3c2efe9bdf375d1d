"""R4 in a session: tried before anything is loaded or claimed, on every rank, once; what fails stops all of them."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from spot_core import memory
from spot_core.config import Settings
from spot_core.errors import AccessError, Reason, StoreError
from spot_core.pytorch.session import Session
from spot_core.run import Run
from spot_core.store import LocalStore, MemoryStore, Store
from spot_core.testing import FailingStore, StoreWrapper


def session_of(store: Store, **settings: object) -> Session:
    return Session(Run.open(store), Settings(**{"sources": "none", "writer": "thread", **settings}))  # type: ignore[arg-type]


def test_a_missing_permission_stops_before_anything_is_loaded_or_claimed() -> None:
    inner = MemoryStore()
    store = FailingStore(inner, lambda _i, verb, key: AccessError("403.") if verb == "delete" else None)
    with session_of(store) as session, pytest.raises(AccessError, match=r"delete: 403\."):
        session.resume()
    puts = [key for verb, key in store.operations if verb.startswith("put")]
    assert puts
    assert all(key.startswith("probes/") for key in puts)
    assert all(info.key.startswith("probes/") for info in inner.list(""))


def test_it_is_done_once_per_life_and_shown_as_a_table(caplog: pytest.LogCaptureFixture) -> None:
    store = StoreWrapper(MemoryStore())
    with session_of(store) as session:
        assert session.resume() is None
        session.start(state_bytes=1000)
    assert [verb for verb, key in store.operations if key.endswith("-a")] == ["put", "delete", "stat"]
    (shown,) = [record for record in caplog.records if "spot: preflight of" in record.message]
    assert shown.levelno == logging.WARNING
    rows = [line.split()[0] for line in shown.message.splitlines()[1:]]
    assert rows == ["look", "write", "write", "read", "list", "clock", "speed", "delete", "memory", "durable"]


def test_start_without_resume_looks_too() -> None:
    store = FailingStore(MemoryStore(), lambda _i, verb, key: AccessError("403.") if verb == "put" else None)
    with session_of(store) as session, pytest.raises(AccessError, match="write: 403"):
        session.start()


def test_switched_off_nothing_is_tried() -> None:
    store = StoreWrapper(MemoryStore())
    with session_of(store, preflight=False) as session:
        session.resume()
        session.start(state_bytes=1000)
    assert not any("probes/" in key for _, key in store.operations)


def test_a_snapshot_that_can_never_fit_is_refused_before_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "total_bytes", lambda: 1 << 20)
    store = LocalStore(tmp_path / "run")
    with session_of(store) as session:
        session.resume()
        with pytest.raises(StoreError, match=r"memory: .*it can never fit") as caught:
            session.start(state_bytes=2 << 20)
    assert caught.value.reason is Reason.NO_SPACE
    assert store.list("lives/") == []


def test_a_local_tier_that_cannot_be_written_to_is_refused(tmp_path: Path) -> None:
    (tmp_path / "nvme").write_text("")
    store = LocalStore(tmp_path / "run")
    with session_of(store, local=str(tmp_path / "nvme")) as session:
        session.resume()
        with pytest.raises(StoreError, match=r"local tier: Cannot replace"):
            session.start()
    assert store.list("lives/") == []


def test_a_local_tier_leaves_no_probe(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with session_of(LocalStore(tmp_path / "run"), local=str(tmp_path / "nvme")) as session:
        session.resume()
        session.start(state_bytes=1000)
    assert "local tier  ok" in caplog.text
    (folder,) = (tmp_path / "nvme").iterdir()
    assert len(folder.name) == 16, "the run's id"


def test_a_disk_without_room_for_one_save_is_refused(tmp_path: Path) -> None:
    with session_of(LocalStore(tmp_path / "run")) as session:
        session.resume()
        with pytest.raises(StoreError, match=r"space: .*not one fits"):
            session.start(state_bytes=1 << 60)
