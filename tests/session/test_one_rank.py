"""Sessions of one rank, in this process: exact resume, failures, fencing, notices, stops, what is said and recorded."""

from __future__ import annotations

import logging
import os
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

from spot_core.config import Settings
from spot_core.errors import (
    AccessError,
    ConfigError,
    DeadlineError,
    FencedError,
    ResumeMismatchError,
    SaveError,
    SpotError,
    StoreError,
)
from spot_core.launch.stoprecord import STOP_NOTE, read_note, read_stop
from spot_core.policy import Kind
from spot_core.pytorch.session import Session
from spot_core.run import Run, Writer
from spot_core.signals import Notice, NoticeKind
from spot_core.store import open_store
from spot_core.testing import FailingStore, SlowStore

from .job import Training, control, save, train


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def uri(tmp_path: Path) -> str:
    return str(tmp_path / "run")


def session_of(store: Any, *, check: Any = None, meta: Any = None, **settings: Any) -> Session:
    settings = {"sources": "none", "interval": "1h", "writer": "thread", "preflight": False, **settings}
    return Session(Run.open(store), Settings(**settings), check=check, meta=meta)


def begun(session: Session) -> Training:
    """A training that the session resumed and started."""
    training = Training()
    training.take_up(session.resume())
    session.start()
    return training


def steps_of(uri: str) -> list[int]:
    return [committed.id.step for committed in Run.open(uri).discover().generations]


def decided(session: Session, training: Training, within: int = 5000) -> Any:
    """Train until a decision comes that is not CONTINUE."""
    for _ in range(within):
        training.forward_backward()
        session.wait_staged()
        training.update()
        decision = session.boundary(training.step)
        if decision.kind is not Kind.CONTINUE:
            return decision
    raise AssertionError(f"no decision within {within} steps")


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


# -- saving and resuming ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("writer", ["process", "thread"])
def test_resume_is_bit_exact_with_the_uninterrupted_run(uri: str, writer: str) -> None:
    with session_of(uri, interval="5 steps", writer=writer) as first:
        train(first, begun(first), 17)
    with session_of(uri, interval="5 steps", writer=writer) as second:
        training = begun(second)
        assert training.step == 15
        train(second, training, 31)
    assert same(training.tensors(), control(31))
    assert steps_of(uri) == [30, 25, 20]


def test_what_is_said_at_the_start(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with session_of(uri, interval="3 steps") as first:
        assert first.life == 0
        train(first, begun(first), 4)
        assert first.life == 1
    assert caplog.messages.count(f"spot: no generation in {uri}, starting at step 0 (life 1)") == 1
    with session_of(uri) as second:
        begun(second)
        assert second.life == 2
    line = f"spot: resumed from step 3 (life 1 -> 2, generation 000001-000000000003 of {uri})"
    assert caplog.messages.count(line) == 1


def test_what_the_manifest_tells(uri: str) -> None:
    with session_of(uri, meta=lambda: {"position": 7, "finished": "overruled"}) as session:
        training = begun(session)
        save(session, training, reason="because", finished=True, wait=True)
    manifest = Run.open(uri).discover().generations[0].manifest
    assert manifest.finished
    assert manifest.meta["reason"] == "because"
    assert manifest.meta["position"] == 7
    assert manifest.meta["versions"]["torch"] == torch.__version__  # type: ignore[call-overload, index]
    assert manifest.meta["settings"]["interval"] == "1h"  # type: ignore[call-overload, index]
    assert "storage_options" not in manifest.meta["settings"]  # type: ignore[operator]
    assert set(manifest.meta) == {"position", "code", "versions", "settings", "history", "pace", "reason", "finished"}


def test_a_later_life_knows_what_saves_cost_and_how_lives_ended(uri: str) -> None:
    with session_of(uri) as first:
        training = begun(first)
        for _ in range(2):
            training.step += 1
            save(first, training, wait=True)
        assert first.stop(training.step, "told to") == 143
    with session_of(uri) as second:
        training = begun(second)
        training.step += 1
        save(second, training, wait=True)
    meta: Any = Run.open(uri).discover().generations[0].manifest.meta
    (life,) = meta["history"]
    assert (life["interrupted"], life["saved"], life["world_size"]) == (True, True, 1)
    assert meta["pace"]["blocked_s"] > 0
    assert meta["pace"]["durable_s"] >= meta["pace"]["staged_s"] > 0


def test_damage_to_the_newest_is_passed_over_with_the_reason(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    with session_of(uri, interval="5 steps") as first:
        train(first, begun(first), 11)
    newest = Run.open(uri).discover().generations[0]
    blob = newest.manifest.parts[0].blob
    assert blob is not None
    data = bytearray((Path(uri) / blob.key).read_bytes())
    data[len(data) // 2] ^= 1
    (Path(uri) / blob.key).write_bytes(data)
    with session_of(uri) as second:
        training = begun(second)
    assert training.step == 5
    assert any(f"generation {newest.id} is passed over: rank 0" in m and "corrupt" in m for m in caplog.messages)
    # The damaged one is in the way of nothing: the next save of a newer life outranks it.
    with session_of(uri) as third:
        training = begun(third)
        train(third, training, 9)
        save(third, training, wait=True)
    assert steps_of(uri)[0] == 9


def test_a_store_that_cannot_be_read_refuses_to_start(uri: str) -> None:
    with session_of(uri, interval="5 steps") as first:
        train(first, begun(first), 6)
    store = FailingStore(open_store(uri), lambda _i, verb, _k: AccessError("403") if verb == "list_dirs" else None)
    with session_of(store) as second, pytest.raises(StoreError, match="403"):
        second.resume()
    assert not (Path(uri) / "lives/000002.json").exists()


def test_another_run_in_the_folder_refuses_to_start(uri: str) -> None:
    with session_of(uri, interval="5 steps") as first:
        train(first, begun(first), 6)

    def check(manifest: Any) -> None:
        assert manifest.step == 5
        raise ResumeMismatchError("another model")

    with session_of(uri, check=check) as second, pytest.raises(ResumeMismatchError, match="another model"):
        second.resume()


def test_a_step_is_saved_once_but_the_end_is_recorded(uri: str) -> None:
    with session_of(uri) as session:
        training = begun(session)
        training.step = 4
        save(session, training, wait=True)
        save(session, training, wait=True)
        assert [c.id.name for c in Run.open(uri).discover().generations] == ["000001-000000000004"]
        save(session, training, finished=True, wait=True)
        save(session, training, finished=True, wait=True)
    generations = Run.open(uri).discover().generations
    assert [c.id.name for c in generations] == ["000002-000000000004", "000001-000000000004"]
    assert [c.manifest.finished for c in generations] == [True, False]
    with session_of(uri) as again:
        resumed = again.resume()
        assert resumed is not None
        assert resumed.finished


def test_the_end_is_recorded_when_nothing_is_pruned_any_more(
    uri: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The life that the end takes would fence the one that prunes."""
    prune, running = Writer.prune, threading.Event()

    def slowly(self: Writer, *args: Any, **kwargs: Any) -> Any:
        running.set()
        threading.Event().wait(0.3)
        return prune(self, *args, **kwargs)

    monkeypatch.setattr(Writer, "prune", slowly)
    with session_of(uri, keep=1) as session:
        training = begun(session)
        for training.step in (3, 4):
            save(session, training, wait=True)
        running.wait(10)
        save(session, training, finished=True, wait=True)
    assert "could not be pruned" not in caplog.text
    assert [(c.id.name, c.manifest.finished) for c in Run.open(uri).discover().generations] == [
        ("000002-000000000004", True)
    ]


def test_only_the_newest_are_kept(uri: str) -> None:
    with session_of(uri, interval="2 steps", keep=2) as session:
        train(session, begun(session), 12)
    assert steps_of(uri) == [12, 10]


# -- failures -----------------------------------------------------------------------------------------------------


class Broken:
    """Blob writes fail while `down` is set."""

    def __init__(self, uri: str) -> None:
        self.down = True
        self.store = FailingStore(open_store(uri), self.fails)

    def fails(self, _index: int, verb: str, _key: str) -> Exception | None:
        return AccessError("disk is read-only (test)") if self.down and verb == "put_blob" else None


def test_failed_saves_are_borne_then_raised(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    broken = Broken(uri)
    with session_of(broken.store, max_failed_saves=2) as session:
        training = begun(session)
        for step in (1, 2):
            training.step = step
            save(session, training, wait=True)
        assert [m for m in caplog.messages if "failed (2 in a row, 2 are borne)" in m and "read-only" in m]
        training.step = 3
        with pytest.raises(SaveError, match=r"disk is read-only \(test\)"):
            save(session, training, wait=True)
    assert steps_of(uri) == []


def test_a_save_that_works_ends_the_row(uri: str) -> None:
    broken = Broken(uri)
    with session_of(broken.store, max_failed_saves=1) as session:
        training = begun(session)
        for step in range(1, 9):
            training.step = step
            broken.down = step % 2 == 1
            save(session, training, wait=True)
    assert steps_of(uri) == [8, 6, 4]


def test_a_failed_save_is_raised_at_the_next_boundary_if_wanted(uri: str) -> None:
    broken = Broken(uri)
    with session_of(broken.store, on_save_error="raise") as session:
        training = begun(session)
        save(session, training)
        with pytest.raises(SaveError, match="read-only"):
            decided(session, training)
        broken.down = False
        save(session, training, wait=True)
    assert steps_of(uri) == [training.step]


def test_a_state_that_could_not_be_loaded_back_is_refused_and_the_next_save_works(uri: str) -> None:
    with session_of(uri) as session:
        training = begun(session)
        with pytest.raises(ConfigError, match="callback"):
            session.save(0, shared=training.shared(), local={"callback": object()})
        save(session, training, wait=True)
    assert steps_of(uri) == [0]


def test_a_rehearsal_refuses_such_a_state_and_writes_nothing(uri: str) -> None:
    with session_of(uri) as session:
        training = begun(session)
        assert session.untried
        with pytest.raises(ConfigError, match="callback"):
            session.rehearse(shared=training.shared(), local={"callback": object()})
        assert not session.untried
        assert steps_of(uri) == []
        save(session, training, wait=True)
    assert steps_of(uri) == [0]


def test_the_first_save_after_a_rehearsal_plans_nothing_and_saves_what_is_there_then(
    uri: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with session_of(uri, interval="100 steps") as session:
        training = begun(session)
        session.reserve(1 << 20)
        assert train(session, training, 1) is None
        assert not session.untried
        for name in ("create_local_plan", "create_global_plan", "set_up_planner"):
            monkeypatch.setattr(DefaultSavePlanner, name, None)
        stager = session._live.stager  # type: ignore[union-attr]
        known = stager._copies
        assert train(session, training, 3) is None
        save(session, training, wait=True)
        listed_anew = stager._copies is not known  # not in an assert, which would print memory that is gone by then
        assert known is not None
        assert not listed_anew
    assert same(begun(session_of(uri)).tensors(), control(3))


def test_what_the_call_was_given_is_freed_when_the_copies_are_done(uri: str) -> None:
    """Freed beside the copying threads, thousands of tensors would each wait for the interpreter (S3)."""
    weight, freed = torch.zeros(5000), []
    with session_of(uri) as session:
        session.resume()
        session.start()
        for step in (1, 2):
            view = weight.view(50, 100)  # made for the call, as by `state_dict`
            session.save(step, shared={"w": view}, local={}, stable=[weight])
            given = weakref.ref(view)
            del view
            freed.append(given() is None)
            session.wait_staged()
            freed.append(given() is None)
            session.drain()
    assert freed[2:] == [False, True]  # those of the first one are what the next are compared with


def test_an_error_in_the_callers_meta_reaches_the_caller(uri: str) -> None:
    def meta() -> dict[str, Any]:
        raise KeyError("gone")

    with session_of(uri, meta=meta) as session:
        training = begun(session)
        with pytest.raises(SpotError, match="KeyError: 'gone'"):
            save(session, training)


def test_the_older_of_two_lives_is_fenced(uri: str) -> None:
    with session_of(uri) as old, session_of(uri) as new:
        training = begun(old)
        training.step = 3
        save(old, training, wait=True)
        begun(new)
        training.step = 9
        save(old, training)
        with pytest.raises(FencedError, match="superseded by life 2"):
            old.drain()
        with pytest.raises(FencedError, match="superseded"):
            save(old, training, wait=True)
    assert steps_of(uri) == [3]


def test_an_upload_slower_than_the_interval_is_reported_with_one_that_holds(
    uri: str, caplog: pytest.LogCaptureFixture
) -> None:
    slow = SlowStore(open_store(uri), lambda verb, _key: verb == "put_blob")
    with session_of(slow, interval="0.05s") as session:
        training = begun(session)
        assert decided(session, training).kind is Kind.SAVE
        save(session, training)
        assert slow.reached.wait(30)
        first = training.step
        said: list[str] = []
        while not said:
            training.forward_backward()
            session.wait_staged()
            training.update()
            assert session.boundary(training.step).kind is Kind.CONTINUE  # never doubled
            said = [m for m in caplog.messages if "still being written" in m]
        assert f"the save of step {first} " in said[0]
        assert "An interval of 1 s or more would hold" in said[0]
        slow.release.set()
        assert decided(session, training).kind is Kind.SAVE
    assert [m for m in caplog.messages if "still being written" in m] == said


# -- notices and stops --------------------------------------------------------------------------------------------


def test_a_preemption_saves_and_stops_with_the_code(uri: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    note = tmp_path / "note"
    monkeypatch.setenv(STOP_NOTE, str(note))
    with session_of(uri, exit_code=85) as session:
        training = begun(session)
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test"))
        decision = decided(session, training)
        assert decision.kind is Kind.STOP_SAVE
        assert "preemption notice from test" in decision.reason
        save(session, training, reason=decision.reason, wait=True)
        assert session.stop(training.step, decision.reason) == 85
    assert steps_of(uri) == [training.step]
    record = read_stop(open_store(uri), 1)
    assert record is not None
    assert (record.life, record.step, record.exit_code) == (1, training.step, 85)
    assert f"saved up to step {training.step}" in record.reason
    assert read_note(note) == record


def test_advisory_saves_once_and_goes_on_cancelled_is_forgotten(uri: str) -> None:
    with session_of(uri) as session:
        training = begun(session)
        session.notify(Notice("maybe", NoticeKind.ADVISORY, "test"))
        decision = decided(session, training)
        assert decision.kind is Kind.SAVE
        save(session, training, wait=True)
        far = Notice("far", NoticeKind.MAINTENANCE, "test", deadline=session._run.clock.now() + 3000)
        session.notify(far)
        assert decided(session, training).kind is Kind.SAVE
        save(session, training, wait=True)
        session.notify(far.cancelled("not today"))
        with pytest.raises(AssertionError, match="no decision"):
            decided(session, training, within=300)


def test_no_time_for_a_save_means_leaving_at_once(uri: str) -> None:
    with session_of(uri) as session:
        training = begun(session)
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test", deadline=session._run.clock.now() + 3))
        decision = decided(session, training)
        assert decision.kind is Kind.STOP_NOW
        assert "too short" in decision.reason
        assert session.stop(training.step, decision.reason) == 143
    record = read_stop(open_store(uri), 1)
    assert record is not None
    assert "nothing was saved" in record.reason


def test_a_stop_finishes_the_save_in_flight(uri: str) -> None:
    slow = SlowStore(open_store(uri), lambda verb, _key: verb == "put_blob")
    with session_of(slow, window_s=9) as session:
        training = begun(session)
        training.step = 5
        save(session, training)
        assert slow.reached.wait(30)
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test"))
        decision = decided(session, training)
        # Nothing was measured, 10 s are assumed for a save, 9 s are usable: only the one in flight can finish.
        assert decision.kind is Kind.STOP_NOW
        assert "only the save in flight can finish" in decision.reason
        slow.release.set()
        assert session.stop(training.step, decision.reason) == 143
    assert steps_of(uri) == [5]
    record = read_stop(open_store(uri), 1)
    assert record is not None
    assert "saved up to step 5" in record.reason


def test_a_stop_does_not_outwait_the_deadline(uri: str) -> None:
    slow = SlowStore(open_store(uri), lambda verb, _key: verb == "put_blob")
    with session_of(slow, window_s=3) as session:
        training = begun(session)
        save(session, training)
        assert slow.reached.wait(30)
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test"))
        decision = decided(session, training)
        assert decision.kind is Kind.STOP_NOW
        assert session.stop(training.step, decision.reason) == 143  # returns, though nothing was released
        assert steps_of(uri) == []
        slow.release.set()


def test_a_stop_gives_up_its_save_when_the_one_in_flight_does_not_end(uri: str, caplog: Any) -> None:
    held: list[bool] = []
    slow = SlowStore(open_store(uri), lambda verb, _key: verb == "put_blob" and bool(held))
    with session_of(slow, window_s=5) as session:
        training = begun(session)
        save(session, training, wait=True)  # now it is known that a save is quick
        held.append(True)
        training.step = 5
        save(session, training)
        assert slow.reached.wait(30)
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test"))
        decision = decided(session, training)
        assert decision.kind is Kind.STOP_SAVE
        save(session, training, wait=True)
        assert session.stop(training.step, decision.reason) == 143  # both return, though nothing was released
        assert "leaves no time for it" in caplog.text
        session.close()
        assert not slow.release.is_set()
        slow.release.set()
    assert steps_of(uri) == [0]
    record = read_stop(open_store(uri), 1)
    assert record is not None
    assert "saved up to step 0" in record.reason


# -- the object ---------------------------------------------------------------------------------------------------


def hanging(uri: str) -> SlowStore:
    return SlowStore(open_store(uri), lambda verb, _key: verb == "put_blob", timeout_s=20)


def test_a_notice_ends_the_wait_behind_a_save_that_hangs(uri: str, caplog: pytest.LogCaptureFixture) -> None:
    slow = hanging(uri)
    with session_of(slow, window_s=3) as session:
        training = begun(session)
        training.step = 5
        save(session, training)
        assert slow.reached.wait(30)
        training.step = 7
        threading.Timer(0.3, session.notify, [Notice("n", NoticeKind.PREEMPTION, "test")]).start()
        save(session, training)
        assert "spot: step 7 is not saved: the save in flight leaves no time for it" in caplog.messages
        decision = decided(session, training)
        assert decision.kind is Kind.STOP_NOW
        assert session.stop(training.step, decision.reason) == 143
        assert steps_of(uri) == []
        slow.release.set()


@pytest.mark.parametrize("hangs", [5, 7])
def test_a_notice_ends_the_wait_for_a_last_save_that_hangs(uri: str, hangs: int) -> None:
    """By an error: the run has not finished, and no boundary follows that could say so."""
    slow = hanging(uri)
    slow.holds = lambda verb, key: verb == "put_blob" and f"{hangs:012d}" in key
    with session_of(slow, window_s=3) as session:
        training = begun(session)
        training.step = 5
        save(session, training)
        if hangs == 5:
            assert slow.reached.wait(30)
        training.step = 7
        threading.Timer(0.3, session.notify, [Notice("n", NoticeKind.PREEMPTION, "test")]).start()
        with pytest.raises(
            DeadlineError, match="step 7 is not saved" if hangs == 5 else "save of step 7 did not finish"
        ):
            save(session, training, finished=True, wait=True)
        assert session.stop(training.step, "no time") == 143
        assert steps_of(uri) == ([] if hangs == 5 else [5])
        slow.release.set()
    record = read_stop(open_store(uri), 1)
    assert record is not None
    assert record.step == 7


def test_settings_from_the_environment(uri: str) -> None:
    environ = {"SPOT_INTERVAL": "2 steps", "SPOT_KEEP": "1", "SPOT_WRITER": "thread", "SPOT_SOURCES": "none"}
    with Session(Run.open(uri), Settings.from_env(environ)) as session:
        train(session, begun(session), 7)
    assert steps_of(uri) == [6]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window_s": 2}, "shorter than the margin"),
        ({"interval": "0s"}, "above zero"),
        ({"sources": "awz"}, "no notice source 'awz'"),
    ],
)
def test_bad_settings_are_told_before_anything_is_touched(uri: str, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        session_of(uri, **settings)
    assert not Path(uri).exists()


def test_several_ranks_need_a_group(uri: str) -> None:
    with pytest.raises(ConfigError, match="gloo group"):
        Session(Run.open(uri), Settings(), rank=0, world_size=2)


def test_closing_is_idempotent_finishes_the_save_and_does_nothing_in_a_forked_child(uri: str) -> None:
    session = session_of(uri)
    training = begun(session)
    save(session, training)
    child = os.fork()
    if child == 0:
        session.close()
        os._exit(0 if session.life == 1 and not session._closed else 1)
    assert os.waitpid(child, 0)[1] == 0
    session.close()
    session.close()
    assert steps_of(uri) == [0]
    with pytest.raises(SaveError, match="not running"):
        save(session, training)


def test_a_run_that_will_not_fit_says_so_at_the_start(
    uri: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("spot_core.memory.available_bytes", lambda: 1 << 20)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    caplog.set_level(logging.INFO)
    with session_of(uri) as session:
        session.start(state_bytes=1 << 19)
    assert [m for m in caplog.messages if "this run will not fit" in m and "2.0 MiB" in m and "1.0 MiB are free" in m]


def test_a_boundary_between_batches_of_a_validation_stops_but_does_not_save(uri: str) -> None:
    with session_of(uri, interval="0.001s") as session:
        training = begun(session)
        session.boundary(1)
        pause = threading.Event()

        def batch() -> Kind:
            pause.wait(
                0.002
            )  # a batch takes some time; without any, all are over before the agreement's thread has run
            return session.boundary(1).kind

        assert {batch() for _ in range(200)} == {Kind.CONTINUE}
        session.notify(Notice("n", NoticeKind.PREEMPTION, "test"))
        kind = next((kind for _ in range(5000) if (kind := batch()) is not Kind.CONTINUE), Kind.CONTINUE)
        assert kind is Kind.STOP_SAVE
        assert training.step == 0
        # The caller could not save there, and has come to the next step: what is decided there is about that one.
        assert session.boundary(2).kind is Kind.CONTINUE
        assert session.boundary(3, again=True).kind is Kind.STOP_SAVE
