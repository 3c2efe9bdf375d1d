"""Real processes, killed with SIGKILL and told to stop with SIGTERM, on one rank and two."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_core.layout import generation_of
from spot_core.run import Run
from spot_core.verify import Depth

from ._harness import assert_equal

SCRIPT = Path(__file__).with_name("_script.py")
KILLED = (-9, 137)


def start(folder: Path, out: Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One start of the script; the whole process group is gone when it returns."""
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    for name in list(env):
        if name.startswith("SPOT_"):
            del env[name]
    process = subprocess.Popen(
        [sys.executable, *launcher, str(SCRIPT), "--folder", str(folder), "--out", str(out), *args],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=env,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def torchrun() -> tuple[str, ...]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(port)


def rows(out: Path, rank: int = 0) -> dict[int, Any]:
    """What was trained on, by batch of the run; a batch that was trained on twice was the same both times."""
    seen: dict[int, Any] = {}
    for line in (out / f"rank{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        assert seen.setdefault(row["batch"], row) == row
    return seen


def assert_same(out: Path, control: Path, ranks: int = 1) -> None:
    for rank in range(ranks):
        assert rows(out, rank) == rows(control, rank)
        got, want = (torch.load(at / f"final-rank{rank}.pt", weights_only=True) for at in (out, control))
        assert_equal(got, want, f"rank {rank}")


def newest(folder: Path) -> int:
    return Run.open(folder).discover().generations[0].id.step


@pytest.mark.parametrize(("workers", "accumulate"), [(0, 1), pytest.param(2, 4, marks=pytest.mark.slow)])
def test_killed_and_told_to_stop(workers: int, accumulate: int, tmp_path: Path) -> None:
    args = ("--workers", str(workers), "--accumulate", str(accumulate))
    control = start(tmp_path / "control", tmp_path / "control-out", *args)
    assert control.returncode == 0, control.stdout[-2000:]
    folder, out = tmp_path / "run", tmp_path / "out"
    assert start(folder, out, *args, "--kill", "13").returncode in KILLED
    told = start(folder, out, *args, "--term", "21", "--pause", "0.05")
    assert told.returncode == 143, told.stdout[-2000:]
    assert newest(folder) >= 21 // accumulate
    done = start(folder, out, *args)
    assert done.returncode == 0, done.stdout[-2000:]
    assert_same(out, tmp_path / "control-out")


def test_told_to_stop_in_validation(tmp_path: Path) -> None:
    """The generation is of the batch before the validation, and the validation is run again in full."""
    control = start(tmp_path / "control", tmp_path / "control-out")
    assert control.returncode == 0, control.stdout[-2000:]
    folder, out = tmp_path / "run", tmp_path / "out"
    args = ("--every", "1000 steps", "--pause", "0.1", "--term", "16", "--in-validation")
    told = start(folder, out, *args)
    assert told.returncode == 143, told.stdout[-2000:]
    assert newest(folder) == 16
    assert max(rows(out)) == 15
    done = start(folder, out)
    assert done.returncode == 0, done.stdout[-2000:]
    assert_same(out, tmp_path / "control-out")


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)], ids=["one rank", "two ranks"])
def test_a_frozen_base_is_written_once_whatever_happens(ranks: int, tmp_path: Path) -> None:
    """Over a SIGKILL, a stop and three lives; the save of a stop refers as well. Caught: a life that forgets what it
    loaded, saves that nobody is told what is frozen of."""
    args = ("--base", "300", "--devices", str(ranks))
    control = start(tmp_path / "control", tmp_path / "control-out", *args)
    assert control.returncode == 0, control.stdout[-2000:]
    folder, out = tmp_path / "run", tmp_path / "out"
    assert start(folder, out, *args, "--kill", "7").returncode in KILLED
    told = start(folder, out, *args, "--term", "11", "--pause", "0.05")
    assert told.returncode == 143, told.stdout[-2000:]
    done = start(folder, out, *args)
    assert done.returncode == 0, done.stdout[-2000:]
    assert_same(out, tmp_path / "control-out", ranks)
    run = Run.open(folder)
    kept = run.discover().generations
    assert len(kept) == 3
    for committed in kept:
        assert run.verify(committed, Depth.DIGESTS).committed == committed
        assert sum(ref.size for ref in committed.manifest.referred) >= 300 * 300 * 4
        assert committed.manifest.own_size < 100_000 * ranks
        assert {generation_of(ref.key).life for ref in committed.manifest.referred} == {1}  # type: ignore[union-attr]
    assert len({ref.key for committed in kept for ref in committed.manifest.bases}) == 1


@pytest.mark.dist
@pytest.mark.slow
def test_two_ranks_killed_and_told_to_stop(tmp_path: Path) -> None:
    """DDP under Lightning's launcher and under torchrun; the signal reaches rank 1 only."""
    args = ("--devices", "2", "--workers", "2")
    control = start(tmp_path / "control", tmp_path / "control-out", *args)
    assert control.returncode == 0, control.stdout[-2000:]
    folder, out = tmp_path / "run", tmp_path / "out"
    assert start(folder, out, *args, "--kill", "5").returncode in KILLED
    told = start(folder, out, *args, "--term", "9", "--ranks", "1", "--pause", "0.05")
    assert told.returncode == 143, told.stdout[-2000:]
    killed = start(folder, out, *args, "--kill", "12", "--ranks", "1", launcher=torchrun())
    assert killed.returncode != 0
    done = start(folder, out, *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-2000:]
    assert_same(out, tmp_path / "control-out", ranks=2)


@pytest.mark.dist
@pytest.mark.slow
def test_an_error_on_one_rank_ends_the_job_and_is_shown(tmp_path: Path) -> None:
    """No collective on the way out: the others are not there. The generations before stay whole."""
    done = start(tmp_path / "run", tmp_path / "out", "--devices", "2", "--fail", "5", "--ranks", "1")
    assert done.returncode not in (0, 143)
    assert "something is wrong with this batch" in done.stdout
    assert newest(tmp_path / "run") in (2, 4)


@pytest.mark.dist
def test_two_ranks_resume(tmp_path: Path) -> None:
    args = ("--devices", "2", "--accumulate", "4")
    control = start(tmp_path / "control", tmp_path / "control-out", *args, launcher=torchrun())
    assert control.returncode == 0, control.stdout[-2000:]
    told = start(
        tmp_path / "run", tmp_path / "out", *args, "--term", "5", "--ranks", "0", "--pause", "0.05", launcher=torchrun()
    )
    assert told.returncode != 0
    assert newest(tmp_path / "run") >= 1
    done = start(tmp_path / "run", tmp_path / "out", *args, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-2000:]
    assert_same(tmp_path / "out", tmp_path / "control-out", ranks=2)
