"""Starts `_script.py` as a process of its own, under torchrun or not, and compares what two jobs left behind."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from spot_core.run import Run

from ._harness import assert_equal

ROOT = Path(__file__).parents[2]
SCRIPT = Path(__file__).with_name("_script.py")
KILLED = (-9, 137)


def environment(**more: str) -> dict[str, str]:
    """Without the settings of the surrounding shell."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("SPOT_", "ACCELERATE_"))}
    ours = {"ACCELERATE_USE_CPU": "true", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    return {**kept, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **ours, **more}


def popen(command: list[str], **more: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment(**more),
        start_new_session=True,
    )


def ended(process: subprocess.Popen[str]) -> subprocess.CompletedProcess[str]:
    """Wait for it; its whole process group is gone when this returns."""
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def start(folder: Path, *args: str, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    """One start of the script, with its run in `folder`/run and its output in `folder`/out."""
    command = [sys.executable, *launcher, str(SCRIPT), "--folder", str(folder / "run"), "--out", str(folder / "out")]
    return ended(popen([*command, *args]))


def torchrun(ranks: int = 2) -> tuple[str, ...]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    return ("-m", "torch.distributed.run", f"--nproc-per-node={ranks}", f"--master-port={port}")


def spot_launch(folder: Path, ranks: int = 2) -> tuple[str, ...]:
    return ("-m", "spot_core.cli", "launch", "--run", str(folder / "run"), f"--nproc-per-node={ranks}", "--")


def lines_of(folder: Path, rank: int = 0) -> list[dict[str, Any]]:
    """What the rank has trained on, in all its lives."""
    return [json.loads(line) for line in (folder / "out" / f"rank{rank}.jsonl").read_text().splitlines()]


def rows(folder: Path, rank: int = 0) -> dict[int, dict[str, Any]]:
    """Rows by batch; a batch that was trained on twice must be the same both times."""
    seen: dict[int, dict[str, Any]] = {}
    for row in lines_of(folder, rank):
        assert seen.setdefault(row["batch"], row) == row
    return seen


def assert_same(job: Path, control: Path, ranks: int = 1) -> None:
    for rank in range(ranks):
        assert rows(job, rank) == rows(control, rank)
        got, want = (torch.load(at / "out" / f"final-rank{rank}.pt", weights_only=True) for at in (job, control))
        assert_equal(got, want, f"rank {rank}")


def newest(folder: Path) -> int:
    return Run.open(folder / "run").discover().generations[0].id.step
