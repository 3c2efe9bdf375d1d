"""The example, killed at random instants, ends as its control does, bit for bit (S1-S3, S6, W3, R1, R2)."""

from __future__ import annotations

from pathlib import Path

import pytest
from aim import Kind
from lives import Job
from prove import Proof, prove

KILLS = 20

# Several starts of a whole training each: a busy machine needs more than the usual limit.
pytestmark = pytest.mark.timeout(900)


def held(folder: Path, job: Job, kills: int, seed: int) -> Proof:
    again = (
        f"prove.py NEW_FOLDER --seed {seed} --kills {kills} --ranks {job.ranks} --workers {job.workers} "
        f"--accumulate {job.accumulate} --epochs {job.epochs} --windows {job.windows} --interval {job.interval}"
    )
    lines = [f"again: python examples/lightning_gpt/{again}"]
    proof = prove(folder, job, kills, seed, lines.append)
    assert proof.problems == [], "\n".join([*lines, *proof.problems])
    assert len(proof.kills) == kills
    assert proof.lives[-1].shot is None
    assert proof.verified > 0
    # It was a run of several lives, not one that began again and again.
    assert any(life.resumed for life in proof.lives)
    return proof


def test_killed_twice_and_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path, windows=480, epochs=2, interval=8, keep=100)
    held(tmp_path, job, kills=2, seed=11)


@pytest.mark.dist
def test_two_ranks_killed_twice_and_the_same(tmp_path: Path) -> None:
    job = Job(tmp_path, ranks=2, windows=640, epochs=2, interval=6, keep=100)
    held(tmp_path, job, kills=2, seed=12)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("accumulate", [1, 4])
@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_killed_twenty_times_and_the_same(tmp_path: Path, ranks: int, workers: int, accumulate: int) -> None:
    job = Job(
        tmp_path,
        ranks=ranks,
        workers=workers,
        accumulate=accumulate,
        windows=640 * ranks,
        epochs=5,
        interval=8 // accumulate,
        keep=1000,
    )
    proof = held(tmp_path, job, KILLS, seed=100 * ranks + 10 * workers + accumulate)
    assert sum(life.mid_save for life in proof.kills) >= 3, "too few kills met a save"
    assert any(life.reached is None for life in proof.kills), "no kill met a life before its first step"
    assert {life.shot.kind for life in proof.kills if life.shot} == set(Kind)
