"""The four cases in which `enable_jit_checkpoint` finishes instead of stopping, diverges, hangs or loses the save.

With SpotTrainerCallback each is saved, leaves with 143 on all ranks, and ends bit for bit as its control (N3, N5, S2).
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from ._processes import SCRIPT, assert_same, ended, newest, popen, spot_launch, start, torchrun

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def test_one_process(tmp_path: Path) -> None:
    """JIT: exit code 0, `train` returns and the script goes on; and the resumed losses and weights are others."""
    control, job = tmp_path / "control", tmp_path / "job"
    assert start(control).returncode == 0
    told = start(job, "--term", "11", "--pause", "0.05", "--every", "1000 steps")
    assert told.returncode == 143, told.stdout[-3000:]
    assert newest(job) >= 11
    assert not (job / "out" / "final-rank0.pt").exists()
    assert start(job).returncode == 0
    assert_same(job, control)


@pytest.mark.dist
def test_a_signal_to_one_rank(tmp_path: Path) -> None:
    """JIT: hangs."""
    control, job = tmp_path / "control", tmp_path / "job"
    assert start(control, launcher=torchrun()).returncode == 0
    told = start(
        job, "--term", "6", "--ranks", "1", "--pause", "0.05", "--every", "1000 steps", launcher=spot_launch(job)
    )
    assert told.returncode == 143, told.stdout[-3000:]
    assert newest(job) >= 6
    assert not list((job / "out").glob("final*"))
    assert start(job, launcher=torchrun()).returncode == 0
    assert_same(job, control, ranks=2)


@pytest.mark.dist
@pytest.mark.parametrize("workers", [0, 2])
def test_a_signal_to_the_launcher(workers: int, tmp_path: Path) -> None:
    """JIT, without workers: the script goes on after `train`; with workers: they die first, and nothing is saved."""
    control, job = tmp_path / "control", tmp_path / "job"
    args = ("--workers", str(workers))
    assert start(control, *args, launcher=torchrun()).returncode == 0
    command = [sys.executable, *spot_launch(job), str(SCRIPT), "--folder", str(job / "run"), "--out", str(job / "out")]
    process = popen([*command, *args, "--pause", "0.1", "--every", "1000 steps"])
    seen = job / "out" / "rank0.jsonl"
    while process.poll() is None and not (seen.exists() and len(seen.read_text().splitlines()) > 4):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGTERM)
    left = ended(process)
    assert left.returncode == 143, left.stdout[-3000:]
    assert newest(job) >= 5
    assert not list((job / "out").glob("final*"))
    assert start(job, *args, launcher=torchrun()).returncode == 0
    assert_same(job, control, ranks=2)
