"""R4: what a run needs is tried before its first step; what is refused is named, with what to grant."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from spot_core import layout, preflight
from spot_core.errors import AccessError, ConfigError, Reason, StoreError, TransientStoreError
from spot_core.grants import grant
from spot_core.preflight import Level, Rate, Report, examine_memory, examine_pace, examine_space, examine_store
from spot_core.run import Run
from spot_core.store import Capabilities, LocalStore, MemoryStore, Store
from spot_core.store._errno import translate
from spot_core.testing import FailingStore, FakeClock, SlowStore, StoreWrapper

NAMES = ["look", "write", "write once", "read", "list", "clock", "speed", "delete"]


@pytest.fixture(autouse=True)
def _small_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preflight, "_SAMPLE_BYTES", 1 << 20)
    monkeypatch.setattr(preflight, "_LONG_SAMPLE_BYTES", 1 << 20)


class Elsewhere(MemoryStore):
    """A memory store that says it is in a bucket."""

    def __init__(self) -> None:
        super().__init__("s3://bucket/runs/a")


def report_of(store: Store, **kw: float) -> Report:
    checks, _ = examine_store(Run.open(store), **kw)
    return Report(store.uri, tuple(checks))


def denied(store: Store, verb: str) -> FailingStore:
    return FailingStore(store, lambda _i, done, key: AccessError("403 Forbidden.") if done == verb else None)


def test_a_store_that_permits_all_passes_and_nothing_is_left(tmp_path: Path) -> None:
    for store in (MemoryStore(), LocalStore(tmp_path / "run")):
        checks, rate = examine_store(Run.open(store))
        assert [(check.name, check.level) for check in checks] == [(name, Level.OK) for name in NAMES]
        assert rate is not None
        assert rate.bytes_s > 1e5
        assert store.list("") == []
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize(
    ("verb", "fails", "grants"),
    [
        ("put", ["write"], ["s3:PutObject (arn:aws:s3:::bucket/runs/a/*)"]),
        ("put_if_absent", ["write once"], ["s3:PutObject (arn:aws:s3:::bucket/runs/a/*)"]),
        ("get", ["look"], ["s3:GetObject"]),
        ("list", ["look"], ["s3:ListBucket"]),
        ("stat", ["clock", "delete"], ["s3:GetObject (arn:aws:s3:::bucket/runs/a/*)"]),
        ("put_blob", ["speed"], ["s3:PutObject and s3:AbortMultipartUpload"]),
        ("delete", ["delete"], ["s3:DeleteObject (arn:aws:s3:::bucket/runs/a/*)"]),
    ],
)
def test_each_denied_operation_is_named_with_what_to_grant(verb: str, fails: list[str], grants: list[str]) -> None:
    report = report_of(denied(Elsewhere(), verb))
    assert [check.name for check in report.failed] == fails
    with pytest.raises(AccessError) as caught:
        report.raise_failed()
    assert caught.value.reason is Reason.ACCESS
    for told in (*grants, "403 Forbidden", "nothing was started", "s3://bucket/runs/a"):
        assert told in caught.value.message
    assert "SPOT_PREFLIGHT=0" in caught.value.hint
    assert all(name in report.text() for name in fails)


def test_a_read_that_is_denied_only_for_new_objects_is_named() -> None:
    store = FailingStore(
        Elsewhere(),
        lambda _i, verb, key: AccessError("403.") if verb == "get" and key.startswith(layout.PROBES) else None,
    )
    (check,) = report_of(store).failed
    assert check.name == "read"
    assert "grant s3:GetObject" in check.detail


def test_what_was_written_is_taken_away_also_when_a_later_check_fails() -> None:
    inner = MemoryStore()
    store = FailingStore(inner, lambda _i, verb, key: AccessError("403.") if verb in ("put", "put_blob") else None)
    assert [check.name for check in report_of(store).failed] == ["write", "speed"]
    assert inner.list("") == []


def test_a_place_that_is_something_else_is_not_written_to() -> None:
    inner = MemoryStore()
    inner.put("thesis.tex", b"years of work")
    store = StoreWrapper(inner)
    with pytest.raises(ConfigError) as caught:
        examine_store(Run.open(store))
    assert caught.value.reason is Reason.NOT_A_RUN
    assert {verb for verb, _ in store.operations} <= {"get", "list", "list_dirs", "stat"}


def test_probes_are_no_part_of_a_run() -> None:
    """A preflight that died leaves them: a run can still be claimed there, and discovery sees nothing."""
    store = MemoryStore()
    store.put(layout.probe_key("ab", "a"), b"left")
    run = Run.open(store)
    assert run.claim().life == 1
    assert run.discover().problems == ()


def test_probes_that_were_left_are_swept_by_the_next_preflight(tmp_path: Path) -> None:
    store = LocalStore(tmp_path / "run")
    old, young = layout.probe_key("aa", "a"), layout.probe_key("bb", "a")
    for key in (old, young):
        store.put(key, b"left")
    a_while_ago = os.stat(tmp_path / "run" / young).st_mtime - preflight.STALE_S - 60
    os.utime(tmp_path / "run" / old, (a_while_ago, a_while_ago))
    assert report_of(store).failed == []
    assert [info.key for info in store.list("")] == [young]


def test_a_full_disk_fails_with_the_reason() -> None:
    full = translate(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "write", "x", "/data/run")
    store = FailingStore(MemoryStore(), lambda _i, verb, key: full if verb == "put_blob" else None)
    report = report_of(store)
    assert [check.name for check in report.failed] == ["speed"]
    with pytest.raises(StoreError) as caught:
        report.raise_failed()
    assert caught.value.reason is Reason.NO_SPACE
    assert "Free space" in caught.value.message


@pytest.mark.skipif(os.geteuid() != 0, reason="as another user the mode bits are enough")
def test_a_folder_that_cannot_be_made_fails(tmp_path: Path) -> None:
    # root may write anywhere with mode bits; a file in the way stops everybody.
    (tmp_path / "file").write_text("")
    report = report_of(LocalStore(tmp_path / "file" / "run"))
    assert [check.name for check in report.failed] == ["write", "write once"]


def test_read_only_file_systems_name_the_folder() -> None:
    readonly = translate(OSError(errno.EROFS, os.strerror(errno.EROFS)), "write", "x", "/data/run")
    store = FailingStore(LocalStore("/data/run"), lambda _i, verb, key: readonly if verb.startswith("put") else None)
    report = report_of(store)
    assert [check.name for check in report.failed] == ["write", "write once"]
    assert "grant read, write and search permission (rwx) on /data/run" in report.failed[0].detail


@pytest.mark.parametrize(("skew", "level"), [(0, Level.OK), (50, Level.OK), (1000, Level.WARN), (-1000, Level.WARN)])
def test_a_clock_that_differs_from_the_stores_is_told(tmp_path: Path, skew: float, level: Level) -> None:
    store = LocalStore(tmp_path)
    store.put(layout.probe_key("aa", "a"), b"")
    now = os.stat(tmp_path / layout.probe_key("aa", "a")).st_mtime
    checks, _ = examine_store(Run.open(store, clock=FakeClock(now + skew)))
    (clock,) = [check for check in checks if check.name == "clock"]
    assert clock.level is level
    if level is Level.WARN:
        assert f"s {'ahead of' if skew > 0 else 'behind'} the store's" in clock.detail
        assert 900 < int(clock.detail.split()[0]) < 1100


def test_a_store_without_conditional_put_warns() -> None:
    class Plain(StoreWrapper):
        @property
        def capabilities(self) -> Capabilities:
            return Capabilities(put_if_absent=False, reopenable=False)

    report = report_of(Plain(MemoryStore()))
    assert report.failed == []
    assert [check.name for check in report.checks if check.level is Level.WARN] == ["write once"]


def test_a_store_that_ignores_the_condition_fails() -> None:
    class Overwriting(StoreWrapper):
        def put_if_absent(self, key: str, data: bytes) -> None:
            self.inner.put(key, data)

    assert [check.name for check in report_of(Overwriting(MemoryStore())).failed] == ["write once", "read"]


def test_a_store_that_is_not_reachable_is_asked_once() -> None:
    store = FailingStore(MemoryStore(), lambda _i, verb, key: TransientStoreError("no route to host"))
    report = report_of(store)
    assert [check.name for check in report.checks] == ["look"]
    assert len(store.operations) == 1
    with pytest.raises(StoreError, match="no route to host"):
        report.raise_failed()


def test_a_store_that_hangs_is_given_up() -> None:
    store = SlowStore(MemoryStore(), lambda verb, key: verb == "put_if_absent")
    try:
        report = report_of(store, limit_s=0.2)
        assert [check.name for check in report.failed] == ["write once"]
        assert "did not answer within 0.2 s (asked to write once)" in report.failed[0].detail
    finally:
        store.release.set()


def test_an_error_that_is_no_stores_is_not_lost() -> None:
    store = FailingStore(MemoryStore(), lambda _i, verb, key: KeyError("a bug") if verb == "put" else None)
    with pytest.raises(KeyError):
        report_of(store)


@pytest.mark.parametrize(
    ("one", "kept", "level"), [(1, 3, Level.OK), (0.3, 3, Level.WARN), (0.3, 2, Level.OK), (1.5, 0, Level.FAIL)]
)
def test_space(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: float, kept: int, level: Level) -> None:
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda _p: type("Usage", (), {"free": 1_000_000_000}))
    one_bytes = int(one * 1e9) if one != 1 else 1_000_000
    check = examine_space("space", tmp_path / "not" / "there", one_bytes, kept)
    assert check.level is level
    assert f"1.0 GB free at {tmp_path}" in check.detail
    if level is Level.FAIL:
        assert check.error is not None
        assert check.error.reason is Reason.NO_SPACE


@pytest.mark.parametrize(("needed", "level"), [(100, Level.OK), (101, Level.WARN), (201, Level.FAIL)])
def test_memory(needed: int, level: Level) -> None:
    assert examine_memory(needed, available=100, total=200).level is level


def test_the_pace_is_predicted_and_compared_with_window_and_interval() -> None:
    rate = Rate(100e6)
    assert (
        examine_pace(1_000_000_000, rate, window_s=25, interval_s=60).detail == "about 10.0 s for 1.0 GB at 100.0 MB/s"
    )
    late = examine_pace(5_000_000_000, rate, window_s=25, interval_s=None)
    assert late.level is Level.WARN
    assert "longer than the 25 s that a notice leaves" in late.detail
    behind = examine_pace(10_000_000_000, rate, window_s=25, interval_s=60)
    assert behind.level is Level.WARN
    assert "longer than the interval of 60 s; an interval of 110 s or more would hold" in behind.detail


@pytest.mark.parametrize(
    ("uri", "told"),
    [
        ("gs://b/run", "storage.objects.delete (for gs://b/run)"),
        ("abfs://c/run", "Storage Blob Data Contributor"),
        ("hdfs://h/run", "Missing permission to delete below hdfs://h/run"),
        ("s3a://b/run", "s3:DeleteObject (arn:aws:s3:::b/run/*)"),
    ],
)
def test_grants_by_kind_of_store(uri: str, told: str) -> None:
    assert told in grant(uri, "delete")
