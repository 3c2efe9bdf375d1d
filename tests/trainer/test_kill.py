"""Real processes: killed at random, in the middle of a save, told to stop on one rank and two (R1, S1-S3, N3, N5)."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest

from ._processes import KILLED, SCRIPT, assert_same, ended, newest, popen, rows, spot_launch, start, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 4)])
def test_killed_and_told_to_stop(workers: int, accumulate: int, tmp_path: Path) -> None:
    args = ("--workers", str(workers), "--accumulate", str(accumulate))
    control, job = tmp_path / "control", tmp_path / "job"
    done = start(control, *args)
    assert done.returncode == 0, done.stdout[-3000:]
    assert start(job, *args, "--kill", "19").returncode in KILLED
    told = start(job, *args, "--term", "29", "--pause", "0.05", "--every", "1000 steps")
    assert told.returncode == 143, told.stdout[-3000:]
    assert newest(job) >= 29 // accumulate
    assert not (job / "out" / "final-rank0.pt").exists(), "the script went on after train()"
    done = start(job, *args)
    assert done.returncode == 0, done.stdout[-3000:]
    assert_same(job, control)


@pytest.mark.parametrize("seed", range(2))
def test_killed_at_any_instant(seed: int, tmp_path: Path) -> None:
    """By the clock, with a save at every step: during start-up, steps, evaluations and saves."""
    control, job = tmp_path / "control", tmp_path / "job"
    args = ("--every", "1 steps", "--workers", "2")
    assert start(control, *args).returncode == 0
    dice, killed = random.Random(seed), 0
    while killed < 4:
        process = popen([sys.executable, str(SCRIPT), *places(job), *args, "--pause", "0.02"])
        wanted = dice.randrange(1, 12) + lines(job)
        while lines(job) < wanted and process.poll() is None:
            time.sleep(dice.uniform(0.0, 0.03))
        if process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGKILL)
        assert ended(process).returncode in KILLED
        killed += 1
    assert killed > 1
    done = start(job, *args)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "resumed from step" in done.stdout
    assert_same(job, control)


def places(job: Path) -> list[str]:
    return ["--folder", str(job / "run"), "--out", str(job / "out")]


def lines(job: Path, rank: int = 0) -> int:
    path = job / "out" / f"rank{rank}.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


@pytest.mark.dist
@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), (2, 4)])
def test_two_ranks(workers: int, accumulate: int, tmp_path: Path) -> None:
    """One rank is killed, one rank is told, the launcher is told; each life continues the one before."""
    args = ("--workers", str(workers), "--accumulate", str(accumulate))
    control, job = tmp_path / "control", tmp_path / "job"
    done = start(control, *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-3000:]
    assert start(job, *args, "--kill", "9", "--ranks", "1", launcher=torchrun()).returncode != 0
    told = start(job, *args, "--term", "12", "--ranks", "1", "--pause", "0.05", launcher=spot_launch(job))
    assert told.returncode == 143, told.stdout[-3000:]
    assert newest(job) >= 12 // accumulate
    process = popen([sys.executable, *spot_launch(job), str(SCRIPT), *places(job), *args, "--pause", "0.1"])
    wanted = lines(job) + 3
    while lines(job) < wanted and process.poll() is None:
        time.sleep(0.02)
    process.send_signal(signal.SIGUSR1)
    left = ended(process)
    assert left.returncode == 143, left.stdout[-3000:]
    done = start(job, *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-3000:]
    assert_same(job, control, ranks=2)


@pytest.mark.dist
def test_two_ranks_over_a_stream(tmp_path: Path) -> None:
    """The first rank reads for both, two batches for each step; the last step of an epoch has one."""
    args = ("--stream", "--arguments", '{"max_steps": 18}')
    control, job = tmp_path / "control", tmp_path / "job"
    done = start(control, *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-3000:]
    assert start(job, *args, "--kill", "7", launcher=torchrun()).returncode != 0
    told = start(job, *args, "--term", "12", "--ranks", "1", "--pause", "0.05", launcher=spot_launch(job))
    assert told.returncode == 143, told.stdout[-3000:]
    done = start(job, *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-3000:]
    assert_same(job, control, ranks=2)


@pytest.mark.dist
def test_an_error_on_one_rank_ends_the_job_and_is_shown(tmp_path: Path) -> None:
    """No collective on the way out: the others are not there. The generations before stay whole."""
    done = start(tmp_path, "--fail", "5", "--ranks", "1", launcher=torchrun())
    assert done.returncode not in (0, 143)
    assert "something is wrong with this batch" in done.stdout
    assert newest(tmp_path) in (2, 4)
    assert max(rows(tmp_path)) <= 5
