"""The parts of `spot launch`, without processes: witness, note, record, what is told at the end."""

from __future__ import annotations

import json
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spot_core.errors import ConfigError, FormatError, KeyExistsError, StoreError, TransientStoreError
from spot_core.launch.evidence import Witness
from spot_core.launch.exit_code import Evidence, Verdict
from spot_core.launch.requeue import is_ending
from spot_core.launch.stoprecord import STOP_NOTE, StopRecord, leave_note, read_note, read_stop, write_stop
from spot_core.launch.supervisor import Supervisor
from spot_core.layout import stop_key
from spot_core.run import Run
from spot_core.store import open_store

RECORD = StopRecord(life=1, step=7, reason="SIGTERM", exit_code=143)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run.open(tmp_path / "run")


def test_the_record_of_a_life_is_put_once_and_read(run: Run) -> None:
    run.claim()
    write_stop(run.store, RECORD)
    with pytest.raises(KeyExistsError):
        write_stop(run.store, replace(RECORD, step=8))
    assert read_stop(run.store, 1) == RECORD
    assert read_stop(run.store, 2) is None


@pytest.mark.parametrize("data", [b"", b"[]", b'{"format": 1}', b'{"format": 1, "life": 1, "step": "x"}'])
def test_a_damaged_record_is_named(run: Run, data: bytes) -> None:
    run.claim()
    run.store.put_if_absent(stop_key(1), data)
    with pytest.raises(FormatError, match=r"stops/000001\.json"):
        read_stop(run.store, 1)


def test_note_goes_from_worker_to_launcher(tmp_path: Path) -> None:
    note = tmp_path / "stop.json"
    assert read_note(note) is None
    leave_note(RECORD, {STOP_NOTE: str(note)})
    leave_note(RECORD, {STOP_NOTE: str(note)})  # a second rank
    assert read_note(note) == RECORD
    assert [path.name for path in tmp_path.iterdir()] == ["stop.json"]


def test_without_a_launcher_no_note_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    leave_note(RECORD, {})
    assert list(tmp_path.iterdir()) == []


def test_witness_tells_the_lives_of_a_run_apart(run: Run, tmp_path: Path) -> None:
    run.claim()
    write_stop(run.store, RECORD)

    def witness() -> Witness:
        found = Witness(run.store, tmp_path / "none")
        found.before()
        return found

    idle, began, stopped = witness(), witness(), witness()
    assert idle.after() == (Evidence.NOT_BEGUN, None)
    run.claim()
    assert began.after() == (Evidence.UNFINISHED, None)
    second = StopRecord(life=2, step=9, reason="SIGTERM", exit_code=85)
    write_stop(run.store, second)
    assert stopped.after() == (Evidence.STOPPED, second)
    # Another launch of the same run after it: the record of life 2 is not its own.
    assert witness().after() == (Evidence.NOT_BEGUN, None)


def test_the_note_is_enough(tmp_path: Path) -> None:
    witness = Witness(None, tmp_path / "stop.json")
    witness.before()
    assert witness.after() == (Evidence.UNKNOWN, None)
    leave_note(RECORD, {STOP_NOTE: str(tmp_path / "stop.json")})
    assert witness.after() == (Evidence.STOPPED, RECORD)


class Broken:
    """A store that fails, or does not answer."""

    uri = "s3://bucket/run"

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def list(self, prefix: str) -> list[Any]:
        if isinstance(self.answer, Exception):
            raise self.answer
        self.answer.wait(30)
        return []


@pytest.mark.parametrize("error", [StoreError("403"), TransientStoreError("time-out")])
def test_an_unreadable_store_is_no_proof(error: Exception, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    witness = Witness(Broken(error), tmp_path / "none")  # type: ignore[arg-type]
    witness.before()
    assert witness.after() == (Evidence.UNKNOWN, None)
    assert "s3://bucket/run cannot be looked up before the start" in caplog.text


def test_a_store_that_does_not_answer_does_not_hold_the_launcher(tmp_path: Path) -> None:
    answer = threading.Event()
    try:
        witness = Witness(Broken(answer), tmp_path / "none", timeout_s=0.1)  # type: ignore[arg-type]
        witness.before()
        assert witness.after() == (Evidence.UNKNOWN, None)
    finally:
        answer.set()


def test_a_clean_stop_is_told_to_kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from spot_core.pytorch import launch

    told: list[str] = []
    monkeypatch.setattr(launch, "write_termination_log", told.append)
    launch._tell(Verdict(143, "stopped", stopped=True), "", RECORD)
    launch._tell(Verdict(1, "a crash"), "", RECORD)
    launch._tell(Verdict(0, "done"), "", None)
    assert [json.loads(text)["step"] for text in told] == [7]


def test_opening_a_run_for_its_record_creates_nothing(tmp_path: Path) -> None:
    witness = Witness(open_store(tmp_path / "run"), tmp_path / "none")
    witness.before()
    assert witness.after() == (Evidence.NOT_BEGUN, None)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        (("--exit-code", "0"), ConfigError, "exit_code=0"),
        (("--exit-code", "1"), ConfigError, "exit_code=1"),
        (("--grace", "0"), ConfigError, "grace_s=0"),
        (("--grace", "soon"), SystemExit, "--grace"),
        (("--run", "memory://x"), ConfigError, "no other process"),
        (("--run-path",), ConfigError, "--run-path"),
        (("--nnodes", "1:two"), ConfigError, "--nnodes 1:two"),
        (("--no-python", "-m"), ConfigError, "exclude each other"),
        (("--no-such-option",), SystemExit, "--no-such-option"),
    ],
)
def test_wrong_options_are_refused_before_anything_starts(
    options: tuple[str, ...],
    error: type[BaseException],
    told: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    from spot_core.pytorch import launch

    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.setattr(launch.torchrun, "run", lambda args: pytest.fail("started"))
    with pytest.raises(error) as raised:
        launch.launch([*options, "--", "train.py"], Supervisor())
    assert told in f"{raised.value} {capsys.readouterr().err}"


@pytest.mark.parametrize(
    ("options", "given", "seen"),
    [
        (("--nnodes=1:2",), None, "1"),  # an agent that joins would die after a minute
        (("--nnodes", "2:3"), None, "1"),
        (("--max-restarts", "1"), None, "1"),  # keys of dead workers would be met again
        (("--nnodes=2", "--node-rank=0"), None, None),
        ((), None, None),  # torch's "1:1"
        (("--nnodes=1:2",), "0", "0"),  # somebody decided
    ],
)
def test_agents_that_come_and_go_share_no_store_with_the_workers(
    options: tuple[str, ...], given: str | None, seen: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spot_core.pytorch import launch

    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    clean = {k: v for k, v in os.environ.items() if k not in (name, "SPOT_RUN")}
    monkeypatch.setattr(os, "environ", clean | ({} if given is None else {name: given}))
    found: list[str | None] = []
    monkeypatch.setattr(launch.torchrun, "run", lambda args: found.append(os.environ.get(name)))
    assert launch.launch([*options, "--", "train.py"], Supervisor()) == 0
    assert found == [seen]


@pytest.mark.parametrize(
    ("shown", "ending"),
    [
        ("JobId=1 JobState=RUNNING Reason=None Dependency=(null)", False),
        ("JobId=1 JobState=COMPLETING Reason=None Dependency=(null)", True),
        ("JobId=1 JobState=COMPLETING Reason=TimeLimit Dependency=(null)", False),
        ("JobId=1 JobState=PENDING Reason=BeginTime Dependency=(null)", True),
        ("", False),
    ],
)
def test_a_job_that_slurm_ends_is_not_asked_for(shown: str, ending: bool) -> None:
    assert is_ending(shown) is ending


@pytest.mark.parametrize(
    "env", [{}, {"SLURM_JOB_ID": "7", "SLURM_PROCID": "1"}], ids=["outside a job", "not the first task"]
)
def test_one_task_of_a_job_asks_for_a_requeue(env: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    from spot_core.launch import requeue

    monkeypatch.setattr(requeue, "_show", lambda job: pytest.fail("asked"))
    assert requeue.requeue_after_stop(env) is False
