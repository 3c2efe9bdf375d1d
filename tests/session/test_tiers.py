"""Two tiers in one process: committed locally at once, drained behind, resumed from the newest that is whole."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_core.config import Settings
from spot_core.errors import AccessError
from spot_core.layout import GenerationId
from spot_core.policy import Kind
from spot_core.pytorch.session import Session
from spot_core.run import Run
from spot_core.signals import Notice, NoticeKind
from spot_core.store import LocalStore, Store
from spot_core.testing import FailingStore, SlowStore
from spot_core.verify import Depth

from .job import Training, control, save, train


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


class Two:
    """A run with a local tier in front, both in folders of the test."""

    def __init__(self, folder: Path) -> None:
        self.uri = str(folder / "run")
        self.local = folder / "nvme"

    def session(self, store: Store | None = None, **settings: Any) -> Session:
        values = {"sources": "none", "interval": "1h", "writer": "thread", "preflight": False, **settings}
        return Session(Run.open(store or self.uri), Settings(local=str(self.local), **values))

    def tier(self) -> Run:
        record = Run.open(self.uri).record()
        assert record is not None
        return Run.open(str(self.local / record.run_id))

    def durable_steps(self) -> list[int]:
        return steps_of(Run.open(self.uri))

    def local_steps(self) -> list[int]:
        return steps_of(self.tier())


def steps_of(run: Run) -> list[int]:
    """Steps of the committed generations, newest first, each of them verified to the last byte."""
    found = run.discover().generations
    for committed in found:
        run.verify(committed, Depth.DIGESTS)
    return [committed.id.step for committed in found]


@pytest.fixture
def two(tmp_path: Path) -> Two:
    return Two(tmp_path)


def begun(session: Session) -> Training:
    training = Training()
    training.take_up(session.resume())
    session.start()
    return training


def step_on(training: Training, session: Session, steps: int = 1) -> None:
    for _ in range(steps):
        training.forward_backward()
        session.wait_staged()
        training.update()


def holding(store_uri: str) -> SlowStore:
    """A store whose blobs do not come through until it is released."""
    return SlowStore(LocalStore(store_uri), lambda verb, _key: verb == "put_blob")


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_both_tiers_hold_each_save_and_a_resume_is_bit_exact(two: Two, writer: str) -> None:
    with two.session(interval="5 steps", writer=writer) as first:
        train(first, begun(first), 17)
        first.drain()
    assert two.durable_steps()[0] == two.local_steps()[0] == 15
    with two.session(interval="100 steps", writer=writer) as second:
        training = begun(second)
        assert training.step == 15
        train(second, training, 31)
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), control(31), strict=True))


def test_a_generation_that_is_only_local_is_resumed_from_and_drained(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    slow = holding(two.uri)
    with two.session(slow) as first:
        training = begun(first)
        step_on(training, first, 3)
        save(first, training)
        slow.reached.wait(10)
        # The machine goes on: the memory is free, and the next save is committed locally beside the drain.
        step_on(training, first, 2)
        save(first, training)
        until(lambda: two.local_steps() == [5, 3])
        kill(slow)
    assert two.durable_steps() == []
    assert two.local_steps() == [5, 3]
    with two.session() as second:
        training = begun(second)
        assert training.step == 5
        assert "only in the local tier" in caplog.text
        committed = second.drain()
        assert committed is not None
        assert committed.id == GenerationId(1, 5)
        step_on(training, second, 4)
        save(second, training, wait=True)
    assert two.durable_steps() == [9, 5]
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), control(9), strict=True))


def kill(slow: SlowStore) -> None:
    """As much of a SIGKILL as can be had in one process: nothing of the drain reaches the store any more."""
    slow.inner = FailingStore(slow.inner, lambda *_: AccessError("the process is dead (test)"))
    slow.release.set()


def until(true: Any, within_s: float = 20.0) -> None:
    """Wait for what a thread does."""
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def only_local_at_5(two: Two) -> None:
    """A life that ends with step 2 at both tiers, and step 5 at the local one only."""
    with two.session() as first:
        training = begun(first)
        step_on(training, first, 2)
        save(first, training, wait=True)
    slow = holding(two.uri)
    with two.session(slow) as second:
        training = begun(second)
        step_on(training, second, 3)
        save(second, training)
        until(lambda: two.local_steps()[:1] == [5])
        kill(slow)
    assert two.durable_steps() == [2]


@pytest.mark.parametrize("damage", ["gone", "no marker", "torn", "corrupt", "another run's", "unreadable"])
def test_a_local_tier_that_is_not_whole_is_passed_over(two: Two, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    only_local_at_5(two)
    newest = two.tier().discover().generations[0]
    root = Path(two.tier().uri)
    blob = root / newest.manifest.parts[0].blob.key  # type: ignore[union-attr]
    marker = blob.parent / "COMMIT.json"
    if damage == "gone":
        shutil.rmtree(two.local)
    elif damage == "no marker":
        marker.unlink()
    elif damage == "torn":
        with blob.open("r+b") as file:
            file.truncate(blob.stat().st_size // 2)
    elif damage == "corrupt":
        data = bytearray(blob.read_bytes())
        data[100] ^= 1
        blob.write_bytes(data)
    elif damage == "another run's":
        marker.write_text(marker.read_text().replace(newest.manifest.run_id, "0" * 16))
    else:
        marker.write_text("{")
    with two.session() as third:
        training = begun(third)
        assert training.step == 2
        step_on(training, third, 7)
    if damage == "corrupt":
        assert "the local copy of generation 000002-000000000005 is passed over" in caplog.text
    assert all(torch.equal(a, b) for a, b in zip(training.tensors(), control(9), strict=True))


def test_the_local_copy_is_read_where_both_tiers_have_it(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    with two.session() as first:
        training = begun(first)
        step_on(training, first, 2)
        save(first, training, wait=True)
    blob = next(Path(two.uri).glob("generations/*/*.blob"))
    blob.write_bytes(bytes(blob.stat().st_size))  # the durable copy is never looked into
    with two.session() as second:
        assert begun(second).step == 2
        assert "from the local tier" in caplog.text
        assert second.drain() is None, "nothing has to be drained"


def test_a_run_that_was_deleted_starts_anew_whatever_is_local(two: Two) -> None:
    only_local_at_5(two)
    shutil.rmtree(two.uri)
    with two.session() as session:
        assert begun(session).step == 0


def test_the_newer_of_two_lives_owns_the_local_tier_too(two: Two) -> None:
    """What a stalled process of an older life still commits locally is never resumed from before a newer life's."""
    only_local_at_5(two)
    with two.session() as third:
        training = begun(third)
        step_on(training, third, 1)
        save(third, training, wait=True)
    tier = two.tier()
    assert tier.discover().generations[0].id == GenerationId(3, 6)
    lives = sorted(path.name for path in Path(tier.uri, "lives").iterdir())
    assert lives == ["000001.json", "000002.json", "000003.json"]


def test_the_local_tier_keeps_few_and_never_loses_the_newest(two: Two) -> None:
    with two.session(interval="2 steps", keep=5) as session:
        train(session, begun(session), 13)
        session.drain()
        assert two.local_steps() == [12, 10, 8]  # the third goes when the next one is written
    assert two.durable_steps()[:1] == [12]


def test_a_local_disk_that_breaks_costs_the_local_copy_and_not_the_save(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    with two.session() as session:
        training = begun(session)
        step_on(training, session, 2)
        save(session, training, wait=True)
        generations = Path(two.tier().uri) / "generations"
        shutil.rmtree(generations)
        generations.write_text("")
        step_on(training, session, 2)
        save(session, training, wait=True)
        assert "writes past its local tier" in caplog.text
    assert two.durable_steps() == [4, 2]


def test_a_drain_that_fails_is_a_failed_save_and_the_next_one_commits(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    broken = [True]
    store = FailingStore(
        LocalStore(two.uri), lambda _i, verb, _k: AccessError("403.") if verb == "put_blob" and broken else None
    )
    with two.session(store) as session:
        training = begun(session)
        step_on(training, session, 2)
        save(session, training)
        assert session.drain() is None
        assert "the save of step 2 failed (1 in a row" in caplog.text
        assert two.local_steps() == [2]
        broken.clear()
        step_on(training, session, 1)
        save(session, training)
        committed = session.drain()
        assert committed is not None
        assert committed.id.step == 3
    assert two.durable_steps() == [3]


def test_a_stop_says_what_is_only_local(two: Two, caplog: pytest.LogCaptureFixture) -> None:
    slow = holding(two.uri)
    with two.session(slow, window_s=3, grace_s=3) as session:
        training = begun(session)
        step_on(training, session, 2)
        save(session, training)
        until(lambda: two.local_steps() == [2])
        session._until = session._clock.now() + 0.3  # as after a notice
        assert session.stop(training.step, "told to") == 143
        kill(slow)
    assert f"nothing was saved; step 2 only at the local tier {two.tier().uri}" in caplog.text


def test_an_interval_save_beside_a_drain_stays_local_until_the_store_is_free(
    two: Two, caplog: pytest.LogCaptureFixture
) -> None:
    slow = holding(two.uri)
    with two.session(slow, interval="20 steps") as session:
        training = begun(session)
        train(session, training, 41)
        until(lambda: two.local_steps() == [40, 20])
        assert "the next one stays at the local tier. An interval of" in caplog.text
        slow.release.set()
        until(lambda: two.durable_steps() == [20])
        # The newest that is only local follows at one of the next boundaries, without another save.
        train(session, training, 59, lambda _step: time.sleep(0.01))
        until(lambda: two.durable_steps() == [40, 20])
        train(session, training, 61)
        committed = session.drain()
        assert committed is not None
        assert committed.id.step == 60
    assert two.durable_steps() == [60, 40, 20]


def test_a_drain_leaves_nothing_that_is_only_local(two: Two) -> None:
    slow = holding(two.uri)
    with two.session(slow) as session:
        training = begun(session)
        for _ in range(3):
            step_on(training, session)
            save(session, training)
        slow.release.set()
        committed = session.drain()
        assert committed is not None
        assert committed.id.step == 3
    assert two.durable_steps() == [3, 1]


def test_a_stop_brings_what_is_only_local_to_the_store(two: Two) -> None:
    slow = holding(two.uri)
    with two.session(slow, interval="2 steps") as session:
        training = begun(session)
        train(session, training, 4)
        until(lambda: two.local_steps() == [4, 2])
        slow.release.set()
        until(lambda: two.durable_steps() == [2])
        session.notify(Notice("n1", NoticeKind.PREEMPTION, "test"))
        decision = session.boundary(4)
        while not decision.kind.stops:
            decision = session.boundary(4)
        assert decision.kind is Kind.STOP_NOW
        session.stop(4, decision.reason)
    assert two.durable_steps() == [4, 2]
