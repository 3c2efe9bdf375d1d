"""Real processes, killed with SIGKILL and told to stop, on one rank and two (R1, S1-S3, N3, N5)."""

from __future__ import annotations

from pathlib import Path

import pytest

from ._processes import KILLED, assert_same, newest, start

pytestmark = pytest.mark.slow


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
