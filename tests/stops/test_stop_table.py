"""Who is told to stop, when and how: all ranks stop at one step, saved, and the next start goes on exactly (N1, N3-N5).

One row per way of being told. A test run with `-k NAME` repeats one row.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from spot_core.launch.stoprecord import read_stop
from spot_core.run import Run
from spot_core.signals import Notice, NoticeKind
from spot_core.signals.flag_file import write_flag

from ._job import RANKS, Start, assert_same, committed_steps, trained

Target = int | str
SIGTERM, SIGUSR1 = signal.SIGTERM, signal.SIGUSR1
PAUSE = {"STOPS_PAUSE": "0.08"}
VALIDATING = {**PAUSE, "STOPS_VALIDATION_PAUSE": "0.3"}
# The next save, which waits for the one in flight, has to be far.
SAVING = {"STOPS_PAUSE": "0.15"}
SAVED_AT = 20


@dataclass(frozen=True)
class Row:
    """`told` are (who, seconds after the one before); a rank by its number, a launcher as "agent" or "agent 1"."""

    told: tuple[tuple[Target, float], ...]
    shape: str = "launch"
    workers: int = 0
    when: str = "training"
    signum: int = SIGTERM
    settings: dict[str, str] = field(default_factory=dict)
    code: int = 143
    fast: bool = False


def all_at(gap_s: float) -> tuple[tuple[Target, float], ...]:
    return ((0, 0.0), (1, gap_s))


BOTH_AGENTS: tuple[tuple[Target, float], ...] = (("agent", 0.0), ("agent 1", 0.3))
ROWS: dict[str, Row] = {
    # spot launch, two ranks
    "rank 0": Row(((0, 0),)),
    "rank 1": Row(((1, 0),), fast=True),
    "rank 1, workers": Row(((1, 0),), workers=2),
    "all": Row(all_at(0)),
    "all, 0.1 s apart": Row(all_at(0.1)),
    "all, 0.3 s apart, workers": Row(all_at(0.3), workers=2),
    "all, 0.5 s apart": Row(all_at(0.5)),
    "rank 1, then rank 0": Row(((1, 0), (0, 0.3))),
    "agent": Row((("agent", 0),)),
    "agent, workers": Row((("agent", 0),), workers=2, fast=True),
    "agent twice": Row((("agent", 0), ("agent", 0.3))),
    "agent three times, workers": Row((("agent", 0), ("agent", 0.1), ("agent", 1.0)), workers=2),
    "rank 0 twice": Row(((0, 0), (0, 0.2))),
    "agent, saving": Row((("agent", 0),), when="saving"),
    "rank 1, saving, workers": Row(((1, 0),), when="saving", workers=2),
    "agent twice, saving": Row((("agent", 0), ("agent", 0.5)), when="saving"),
    "rank 1, validating": Row(((1, 0),), when="validating", fast=True),
    "rank 0, validating": Row(((0, 0),), when="validating"),
    "agent, validating, workers": Row((("agent", 0),), when="validating", workers=2),
    "SIGUSR1 to the agent": Row(
        (("agent", 0),), signum=SIGUSR1, settings={"SPOT_SOURCES": "signals:SIGUSR1+SIGTERM"}, workers=2
    ),
    "SIGUSR1 to rank 1": Row(((1, 0),), signum=SIGUSR1, settings={"SPOT_SOURCES": "signals:SIGUSR1"}),
    "code 85": Row((("agent", 0),), settings={"SPOT_EXIT_CODE": "85"}, code=85),
    # two spot launch, one rank each, as on two machines
    "nodes, rank 0": Row(((0, 0),), shape="agents"),
    "nodes, rank 1, workers": Row(((1, 0),), shape="agents", workers=2),
    "nodes, first agent": Row((("agent", 0),), shape="agents"),
    "nodes, second agent": Row((("agent 1", 0),), shape="agents"),
    "nodes, both agents": Row(BOTH_AGENTS, shape="agents", workers=2),
    "nodes, first agent, validating": Row((("agent", 0),), shape="agents", when="validating"),
    "nodes, second agent, saving": Row((("agent 1", 0),), shape="agents", when="saving"),
    # torchrun itself: it leaves with 1 whatever the workers leave with
    "torchrun, rank 1": Row(((1, 0),), shape="torchrun"),
    "torchrun, agent, workers": Row((("agent", 0),), shape="torchrun", workers=2),
    "torchrun, all, 0.3 s apart": Row(all_at(0.3), shape="torchrun"),
    # Lightning's own launcher
    "lightning, rank 0": Row(((0, 0),), shape="lightning"),
    "lightning, rank 1": Row(((1, 0),), shape="lightning"),
    "lightning, all, 0.3 s apart": Row(all_at(0.3), shape="lightning", workers=2),
    # one process
    "one": Row(((0, 0),), shape="one"),
    "one, twice, workers": Row(((0, 0), (0, 0.2)), shape="one", workers=2, fast=True),
    "one, validating": Row(((0, 0),), shape="one", when="validating"),
    "one, saving": Row(((0, 0),), shape="one", when="saving"),
    "one, code 85, twice": Row(((0, 0), (0, 0.5)), shape="one", settings={"SPOT_EXIT_CODE": "85"}, code=85),
}  # fmt: skip


@pytest.fixture(scope="module")
def control(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int, int], Path]:
    """By ranks and workers the folder of a job that nobody interrupted; made once."""
    made: dict[tuple[int, int], Path] = {}

    def folder(ranks: int, workers: int = 0) -> Path:
        if (ranks, workers) not in made:
            at = tmp_path_factory.mktemp(f"control-{ranks}-{workers}")
            with Start("one" if ranks == 1 else "launch", at, {"STOPS_WORKERS": str(workers)}) as job:
                assert job.finish() == [0]
            made[ranks, workers] = at
        return made[ranks, workers]

    return folder


def marks(row: Row) -> list[pytest.MarkDecorator]:
    return [*([] if row.fast else [pytest.mark.slow]), *([pytest.mark.dist] if RANKS[row.shape] > 1 else [])]


@pytest.mark.parametrize("row", [pytest.param(row, id=name, marks=marks(row)) for name, row in ROWS.items()])
def test_told_to_stop(row: Row, tmp_path: Path, control: Callable[[int, int], Path]) -> None:
    settings = {"STOPS_WORKERS": str(row.workers), **row.settings}
    slow = {"validating": VALIDATING, "saving": SAVING}.get(row.when, PAUSE)
    often = {"SPOT_INTERVAL": f"{SAVED_AT} steps"} if row.when == "saving" else {}
    with Start(row.shape, tmp_path, {**settings, **slow, **often}) as job:
        resume_writers = reach(job, row.when)
        for target, after_s in row.told:
            time.sleep(after_s)
            job.tell(target, row.signum)
        if row.when == "saving":
            job.wait_output("stopping at step")
            resume_writers()
        codes = job.finish()
        output = job.output()
    step = assert_stopped(row, job, codes, output)
    if row.when == "saving":
        assert committed_steps(tmp_path) == [step, SAVED_AT]
    else:
        assert committed_steps(tmp_path) == [step]
    assert_goes_on(row.shape, settings, tmp_path, step, control(RANKS[row.shape], row.workers))


def reach(job: Start, when: str) -> Callable[[], Any]:
    """Wait until the moment has come; for a save in flight the writers are held until the returned call."""
    if when == "validating":
        job.wait_validation()
    else:
        job.wait_training()
    if when != "saving":
        return lambda: None
    writers = job.writers()
    assert len(writers) == job.ranks
    for writer in writers:
        writer.suspend()
    job.wait_training(SAVED_AT + 1)
    return lambda: [writer.resume() for writer in writers]


def assert_stopped(row: Row, job: Start, codes: list[int], output: str) -> int:
    """Every rank left with the code, at one step, and said so once; returns the step."""
    assert job.exits() == [row.code] * job.ranks
    assert codes == [1 if row.shape == "torchrun" else row.code] * len(codes)
    last = {job.batches(rank)[-1] for rank in range(job.ranks)}
    assert len(last) == 1
    step = last.pop() + 1
    if row.when == "validating":
        assert step == next(r["validation"] for r in job.rows(0) if "validation" in r)
    record = read_stop(Run.open(job.folder / "run").store, 1)
    assert record is not None
    assert (record.step, record.exit_code) == (step, row.code)
    name = "sigterm" if row.signum == SIGTERM else "sigusr1"
    assert name in record.reason
    assert f"saved up to step {step}" in record.reason
    assert output.count("stopping at step") == 1
    assert output.count(" stopped at step") == 1
    assert output.count("Stopped cleanly at step") == sum(row.shape in ("launch", "agents") for _ in codes)
    if row.shape != "torchrun":
        assert "Traceback" not in output
    else:  # shows how it left itself, and if it was not told to, how the workers did
        assert output.count("Traceback") == 1
        assert output.count(f"exitcode  : {row.code} ") == (0 if row.told[0][0] == "agent" else 2)
    return step


def assert_goes_on(shape: str, settings: dict[str, str], folder: Path, step: int, control: Path) -> None:
    with Start(shape, folder, settings) as job:
        assert set(job.finish()) == {0}
        output = job.output()
    assert job.batches(0)[0] == step
    assert output.count(f"resumed from step {step} ") == 1
    assert "Traceback" not in output
    assert_same(folder, control, job.ranks)
    assert len(trained(folder, 0)) == committed_steps(folder)[0]


@pytest.mark.slow
@pytest.mark.parametrize("shape", ["one", pytest.param("torchrun", marks=pytest.mark.dist)])
def test_told_again_while_leaving(shape: str, tmp_path: Path) -> None:
    """By the platform, or by torchrun, which ends the peers of a rank that left: the exit and its code stay."""
    with Start(shape, tmp_path, {"SPOT_EXIT_CODE": "85", "STOPS_EXIT_PAUSE": "3", **PAUSE}) as job:
        job.wait_training()
        job.tell(0)
        job.wait_for(lambda: any("leaving" in row for row in job.rows(0)), "rank 0 is at its exit")
        if shape == "one":
            job.tell(0)
            assert job.finish() == [85]
        else:
            assert job.finish() == [1]
            assert "closing signal SIGTERM" in job.output()
            assert job.output().count("exitcode  : 85 ") == 2
    assert any("left" in row for row in job.rows(0))


# -- notices that are no signal ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("shape", ["launch", "agents"])
def test_a_flag_file_stops_all_ranks(shape: str, tmp_path: Path, control: Callable[[int, int], Path]) -> None:
    flag = tmp_path / "stop-now"
    settings = {"SPOT_SOURCES": f"file:{flag}"}
    with Start(shape, tmp_path / "job", {**settings, **PAUSE}) as job:
        job.wait_training()
        flag.touch()
        codes = job.finish()
    assert set(codes) == {143}
    assert job.exits() == [143, 143]
    (step,) = committed_steps(job.folder)
    assert job.batches(0)[-1] == job.batches(1)[-1] == step - 1
    # The file is still there: it is of the earlier life and stops no other.
    assert_goes_on(shape, settings, job.folder, step, control(2, 0))


@pytest.mark.slow
@pytest.mark.dist
def test_an_advisory_notice_saves_early_and_training_goes_on(
    tmp_path: Path, control: Callable[[int, int], Path]
) -> None:
    flag = tmp_path / "rebalance"
    with Start("launch", tmp_path / "job", {"SPOT_SOURCES": f"file:{flag}", **PAUSE}) as job:
        job.wait_training()
        write_flag(flag, Notice("rebalance", NoticeKind.ADVISORY, "test", None, "a better machine is near"))
        assert job.finish() == [0]
        output = job.output()
    assert job.exits() == [None, None]
    end, early = committed_steps(job.folder)
    assert 3 < early < end == len(trained(job.folder, 0))
    assert "stopping at step" not in output
    assert read_stop(Run.open(job.folder / "run").store, 1) is None
    assert_same(job.folder, control(2, 0), 2)


# -- a rank that dies meanwhile ---------------------------------------------------------------------------------------


@pytest.mark.dist
@pytest.mark.parametrize(
    ("shape", "victim"),
    [
        pytest.param("launch", 1),
        pytest.param("launch", 0, marks=pytest.mark.slow),
        pytest.param("agents", 1, marks=pytest.mark.slow),
        pytest.param("torchrun", 1, marks=pytest.mark.slow),
    ],
)
def test_a_rank_killed_while_they_agree(
    shape: str, victim: int, tmp_path: Path, control: Callable[[int, int], Path]
) -> None:
    """The victim does not answer, then it is killed: the others leave, and the generation before is whole."""
    with Start(shape, tmp_path, {"SPOT_INTERVAL": "4 steps", **PAUSE}) as job:
        job.wait_training(6)
        job.wait_for(lambda: committed_steps(tmp_path), "the first generation")
        rank = job.rank(victim)
        rank.suspend()
        job.tell(1 - victim)
        job.wait_output("notice signal:sigterm")
        time.sleep(0.3)
        rank.kill()
        codes = job.finish()
    assert 0 not in codes
    assert 143 not in codes
    step = committed_steps(tmp_path)[0]
    assert step % 4 == 0
    assert read_stop(Run.open(tmp_path / "run").store, 1) is None
    assert_goes_on(shape, {}, tmp_path, step, control(2, 0))


@pytest.mark.slow
@pytest.mark.dist
def test_a_save_in_flight_that_never_ends(tmp_path: Path, control: Callable[[int, int], Path]) -> None:
    """It is given up in time for a stop in order; the generation before it counts."""
    settings = {"SPOT_INTERVAL": f"{SAVED_AT} steps", "SPOT_WINDOW_S": "12", "SPOT_GRACE_S": "20"}
    with Start("launch", tmp_path, {**settings, **SAVING}) as job:
        job.wait_for(lambda: committed_steps(tmp_path), "the first generation")
        for writer in job.writers():
            writer.suspend()
        job.wait_training(2 * SAVED_AT + 1)
        job.tell("agent")
        assert job.finish() == [143]
        output = job.output()
    assert job.exits() == [143, 143]
    assert "Traceback" not in output
    assert committed_steps(tmp_path) == [SAVED_AT]
    record = read_stop(Run.open(tmp_path / "run").store, 1)
    assert record is not None
    assert record.step == job.batches(0)[-1] + 1 == job.batches(1)[-1] + 1
    assert f"saved up to step {SAVED_AT} " in record.reason
    assert_goes_on("launch", {}, tmp_path, SAVED_AT, control(2, 0))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize(
    ("behind", "told"), [("the next save", "agent"), ("the next save", 1), ("the last save", 0)], ids=str
)
def test_no_boundary_comes_behind_a_save_that_never_ends(
    behind: str, told: Target, tmp_path: Path, control: Callable[[int, int], Path]
) -> None:
    """All ranks stand still in a save. They give it up in time for a stop in order."""
    settings = {"SPOT_INTERVAL": f"{SAVED_AT} steps", "SPOT_WINDOW_S": "12", "SPOT_GRACE_S": "20", **SAVING}
    batches = 2 * SAVED_AT if behind == "the next save" else 3 * 8
    epochs = {} if behind == "the next save" else {"STOPS_EPOCHS": "3"}
    with Start("launch", tmp_path, {**settings, **epochs}) as job:
        job.wait_for(lambda: committed_steps(tmp_path), "the first generation")
        for writer in job.writers():
            writer.suspend()
        job.wait_training(batches)
        time.sleep(1)
        assert [len(job.batches(rank)) for rank in range(2)] == [batches, batches]
        job.tell(told)
        assert job.finish() == [143]
    assert job.exits() == [143, 143]
    assert "Traceback" not in job.output()
    assert committed_steps(tmp_path) == [SAVED_AT]
    record = read_stop(Run.open(tmp_path / "run").store, 1)
    assert record is not None
    # With a save at an interval the loop goes on to the next boundary.
    assert record.step == len(job.batches(0)) == len(job.batches(1)) == batches + (behind == "the next save")
    assert f"saved up to step {SAVED_AT} " in record.reason
    assert_goes_on("launch", {}, tmp_path, SAVED_AT, control(2, 0))


@pytest.mark.slow
@pytest.mark.dist
def test_told_to_stop_while_starting(tmp_path: Path, control: Callable[[int, int], Path]) -> None:
    """Before training starts there is nothing to save; the job still asks to be started again, and begins anew."""
    with Start("launch", tmp_path, PAUSE) as job:
        job.wait_output("All distributed processes registered")
        job.tell("agent")
        assert job.finish() == [143]
        assert "Traceback" not in job.output()
    with Start("launch", tmp_path, {}) as job:
        assert job.finish() == [0]
    assert_same(tmp_path, control(2, 0), 2)
