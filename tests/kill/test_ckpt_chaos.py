"""The outside crash harness ckpt-chaos finds nothing on scripts that use the callback or the flag (W3, R1, R2, W6).

It kills the script at each file event (before it, with the file torn, losing what was not fsynced, or by SIGTERM with
a grace), starts it again, and compares the final weights with a twin that was never killed. The file events of the
trainer and of the writer process are taken in turn.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from ckpt_chaos.runner import Row, rejudge

HERE = Path(__file__).resolve().parent
# Several starts of a whole training each: a busy machine needs more than the usual limit.
pytestmark = pytest.mark.timeout(900)

BAD = {"HARD_FAIL", "SILENT_DIVERGENCE", "LOST_WORK", "CONTROL_FAIL"}


PLAIN, LIGHTNING = "chaos_plain.py", "chaos_script.py"
ACCELERATE, TRAINER = "chaos_accelerate.py", "chaos_trainer.py"


def chaos(
    folder: Path,
    script: str,
    *,
    arm: str,
    writer: str,
    points: int,
    modes: str = "before,torn,term,unsynced",
    ranks: int = 1,
    crash_rank: int = 0,
    jobs: int = 1,
) -> tuple[list[Row], list[str]]:
    """The judged rows, and the names of the files whose events the harness had to choose from."""
    work = folder / "work"
    result = "final.bin" if script == PLAIN else "final.pt"
    path, flag, program = os.pathsep.join([str(HERE / "chaos_boot"), str(HERE.parents[1])]), [], []
    if script == ACCELERATE:  # the script knows nothing of its run
        flag = ["RUN={out}/run", "INTERVAL=4 steps", "KEEP=100", f"WRITER={writer}"]
        flag = [f"ACCELERATE_SPOT_{each}" for each in flag]
        program = ["-m", "accelerate_spot.launch.runner"]
    command = [
        sys.executable, "-m", "ckpt_chaos", "run",
        "--modes", modes, "--grace", "20", "--max-points", str(points), "--timeout", "200", "--jobs", str(jobs),
        "--ranks", str(ranks), "--crash-rank", str(crash_rank),
        "--checkpoint-glob", "{out}/run/generations/*", "--ckpt-ignore-size",
        "--step-regex", r"resumed from step (\d+)",
        "--result-file", f"{{out}}/{result}",
        "--fail-on", ",".join(sorted(BAD)),
        "--work", str(work),
        # `env` replaces the path that ckpt-chaos sets for its own way of arming.
        "--", "env", f"PYTHONPATH={path}", f"CHAOS_ARM={arm}", *flag,
        sys.executable, *program, str(HERE / script), "{out}", writer,
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    log = work / "reference" / f"events.log.rank{crash_rank}"
    return rejudge(work), [line.split("\t")[2] for line in log.read_text().splitlines()]


def check(rows: list[Row], points: int) -> None:
    assert {row.verdict for row in rows} == {"PASS"}
    killed = [row for row in rows if not row.label.startswith("no crash")]
    assert len(killed) == points
    # A notice that comes with the last file of the run finds nothing left to stop.
    assert all(row.crashed for row in killed if "[term]" not in row.label)
    # Not by starting again at zero, or the weights would prove nothing about resuming.
    assert any(row.outcome.resumed_from_step for row in killed)


LANES = {
    "writer process": {"arm": "writer", "writer": "process"},
    "trainer": {"arm": "main", "writer": "process"},
    "writer thread": {"arm": "main", "writer": "thread"},
}


def victim(lane: str, ranks: int) -> int:
    """The last rank; where its trainer writes nothing, because its writer does, the first one, which commits."""
    return 0 if lane == "trainer" else ranks - 1


def check_files(lane: str, files: list[str], *, coordinator: bool = True) -> None:
    """The lane is not vacuous: the files that it is about were among those that the harness chose from."""
    assert any(name.endswith(".blob") for name in files) == (lane != "trainer")
    assert any(name.endswith(".index.json") for name in files) == (lane != "trainer")
    assert ("COMMIT.json" in files) == (lane != "writer process" and coordinator)


@pytest.mark.parametrize("lane", LANES)
def test_core_alone(tmp_path: Path, lane: str) -> None:
    rows, files = chaos(tmp_path, PLAIN, **LANES[lane], points=8, jobs=2)
    check(rows, points=8)
    check_files(lane, files)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("lane", LANES)
def test_core_alone_at_every_event(tmp_path: Path, lane: str) -> None:
    rows, files = chaos(tmp_path, PLAIN, **LANES[lane], points=10_000, jobs=2)
    check(rows, points=len(rows) - 1)
    assert len(rows) > 3 * len(files)


def test_lightning_with_its_writer_killed(tmp_path: Path) -> None:
    rows, files = chaos(tmp_path, LIGHTNING, **LANES["writer process"], modes="torn", points=2)
    check(rows, points=2)
    check_files("writer process", files)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_lightning_in_every_mode(tmp_path: Path, lane: str, ranks: int) -> None:
    rows, files = chaos(tmp_path, LIGHTNING, **LANES[lane], points=16, ranks=ranks, crash_rank=victim(lane, ranks))
    check(rows, points=16)
    check_files(lane, files, coordinator=victim(lane, ranks) == 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_accelerate_in_every_mode(tmp_path: Path, lane: str, ranks: int) -> None:
    rows, files = chaos(tmp_path, ACCELERATE, **LANES[lane], points=16, ranks=ranks, crash_rank=victim(lane, ranks))
    check(rows, points=16)
    check_files(lane, files, coordinator=victim(lane, ranks) == 0)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("lane", LANES)
@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_the_transformers_trainer_in_every_mode(tmp_path: Path, lane: str, ranks: int) -> None:
    rows, files = chaos(tmp_path, TRAINER, **LANES[lane], points=16, ranks=ranks, crash_rank=victim(lane, ranks))
    check(rows, points=16)
    check_files(lane, files, coordinator=victim(lane, ranks) == 0)
