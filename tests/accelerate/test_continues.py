"""Killed or told to stop and started again, an unchanged script ends as if nothing had happened: bit for bit."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ._evidence import assert_continued, lives
from ._starts import SCRIPT, start

Control = Callable[..., Path]
EPOCH = 8  # batches of 4 in 32 samples, one process


def life(tmp_path: Path, after: int, how: str, *options: Any, processes: int = 1, **keyword: Any) -> None:
    """A start that ends by a signal after so many batches."""
    codes = start(
        tmp_path / "out", *options, "--after", after, "--signal", how,
        run=tmp_path / "run", processes=processes, **keyword,
    )
    assert set(codes) <= ({-9} if how == "SIGKILL" else {143}), codes


def last_life(tmp_path: Path, *options: Any, processes: int = 1) -> None:
    assert start(tmp_path / "out", *options, run=tmp_path / "run", processes=processes) == [0] * processes


def test_killed(tmp_path: Path, control: Control) -> None:
    want = control()
    life(tmp_path, EPOCH // 2 + 1, "SIGKILL")  # in epoch 0
    life(tmp_path, EPOCH + 1, "SIGKILL")  # in a later one
    last_life(tmp_path)
    assert_continued(tmp_path / "out", want, lost=None)


@pytest.mark.parametrize("how", ["SIGTERM", pytest.param("SIGUSR1", marks=pytest.mark.slow)])
def test_told_to_stop(tmp_path: Path, control: Control, how: str) -> None:
    """In epoch 0; at its last batch; in the middle of an evaluation; in the last epoch. Nothing is done twice."""
    want = control()
    life(tmp_path, 3, how)
    life(tmp_path, EPOCH - 3, how)
    life(tmp_path, 2, how, "--in-evaluation")
    life(tmp_path, 2 * EPOCH - 1, how)
    last_life(tmp_path)
    assert_continued(tmp_path / "out", want)
    assert [bool(rows) for rows in lives(tmp_path / "out")] == [True, True, False, True, True]


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_no_skipped_sample_is_read(tmp_path: Path, workers: int) -> None:
    life(tmp_path, EPOCH + 4, "SIGTERM", "--workers", workers)
    reads = tmp_path / "reads"
    last_life(tmp_path, "--workers", workers, "--reads", reads)
    trained = [sample for row in lives(tmp_path / "out")[1] if row[0] != "eval" for sample in row[2]]
    assert len(trained) < 2 * EPOCH * 4
    read = list(map(int, reads.read_text().splitlines()))
    assert (read if workers == 0 else sorted(read)) == (trained if workers == 0 else sorted(trained))


@pytest.mark.parametrize("how", ["epochs", "counters"])
def test_a_script_that_says_where_it_is(tmp_path: Path, how: str) -> None:
    """The one documented line, and counters that end the loop; restarted once more when it is through."""
    options = {"script": SCRIPT.with_name("_script_own.py"), "environment": {"ACCELERATE_SPOT_EPOCH_LOOP": "off"}}
    assert start(tmp_path / "control", how, run=tmp_path / "control-run", **options) == [0]
    for after in (5, 9):
        codes = start(tmp_path / "out", how, "--after", after, run=tmp_path / "run", **options)
        assert codes == [143]
    for _ in range(2):
        assert start(tmp_path / "out", how, run=tmp_path / "run", **options) == [0]
    assert_continued(tmp_path / "out", tmp_path / "control")
    assert [bool(rows) for rows in lives(tmp_path / "out")] == [True, True, True, False]


def test_everything_that_was_prepared_and_registered(tmp_path: Path) -> None:
    """Told where gradients of one model wait for its next step, and where the scaler has skipped one."""
    script = SCRIPT.with_name("_script_parts.py")
    assert start(tmp_path / "control", run=tmp_path / "control-run", script=script) == [0]
    for after in (2, 4):
        assert start(tmp_path / "out", "--after", after, run=tmp_path / "run", script=script) == [143]
    assert start(tmp_path / "out", run=tmp_path / "run", script=script) == [0]
    begins = assert_continued(tmp_path / "out", tmp_path / "control")
    assert len(begins) == 3
    (want,) = lives(tmp_path / "control")
    assert len({row[-1] for row in want}) > 2, "the scale was changed on the way"


def test_two_processes(tmp_path: Path, control: Control) -> None:
    """Workers, accumulation; one rank is told; then all are killed."""
    options = ("--workers", 2, "--accumulate", 2, "--count", 60)
    want = control(*options, processes=2)
    codes = start(
        tmp_path / "out", *options, "--after", 5, "--signal", "SIGTERM", "--ranks", "1",
        run=tmp_path / "run", processes=2,
    )
    assert codes == [143, 143]
    life(tmp_path, 6, "SIGKILL", *options, processes=2, interval="2 steps")
    last_life(tmp_path, *options, processes=2)
    assert_continued(tmp_path / "out", want, ranks=2, lost=None)


# -- the rest of the matrix: slow -------------------------------------------------------------------------------------

STOPS = {
    "in epoch 0": lambda per: [per // 2],
    "in a later epoch": lambda per: [per + 3],
    "at an epoch's end": lambda per: [per],
    "often": lambda per: [3, 2, per, per // 2],
}


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGKILL", "SIGTERM"])
@pytest.mark.parametrize("when", STOPS)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("processes", [1, 2])
def test_the_matrix(
    tmp_path: Path, control: Control, processes: int, workers: int, accumulate: int, when: str, how: str
) -> None:
    """Two processes: SIGTERM goes to one of them, SIGKILL to both."""
    count = 48 * processes
    options: tuple[Any, ...] = ("--workers", workers, "--accumulate", accumulate, "--count", count)
    per_epoch = 12
    want = control(*options, processes=processes)
    told = ("--ranks", "1") if processes == 2 and how == "SIGTERM" else ()
    for after in STOPS[when](per_epoch):
        life(tmp_path, after, how, *options, *told, processes=processes, interval="2 steps")
    last_life(tmp_path, *options, processes=processes)
    assert_continued(tmp_path / "out", want, ranks=processes, lost=0 if how == "SIGTERM" else None)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["SIGTERM", "SIGUSR1"])
@pytest.mark.parametrize("processes", [1, 2])
def test_during_an_evaluation(tmp_path: Path, control: Control, processes: int, how: str) -> None:
    options = ("--count", 32 * processes)
    want = control(*options, processes=processes)
    told = ("--ranks", "0") if processes == 2 else ()
    for after in (1, 2, 1):
        life(tmp_path, after, how, *options, "--in-evaluation", *told, processes=processes)
    last_life(tmp_path, *options, processes=processes)
    assert_continued(tmp_path / "out", want, ranks=processes)
