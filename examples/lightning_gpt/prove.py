"""Kills the training at chosen instants, starts it again with the same command, and compares with a control.

    python prove.py runs/proof --kills 3

Exit code 0: the run that was killed ended with the same weights, optimizer state and sequence of samples, bit for
bit. 1: something differs; it is printed.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

import typer
from aim import Kind, Shot, fire, plan
from compare import differences, merged, rows
from lives import Job, Life
from picture import draw
from rich.console import Console
from rich.table import Table

from spot_core.run import Run

LIFE_TIMEOUT_S = 900.0


@dataclass(frozen=True)
class Ended:
    """One life of the main job. Steps are optimizer steps; None where the life did not get so far."""

    shot: Shot | None  # None: it ended by itself
    newest_before: int  # newest committed step when it began, 0 when there was none
    resumed: int | None
    reached: int | None
    newest_after: int
    mid_save: bool  # it left a generation without a marker
    evidence: int | None  # number of its evidence file

    @property
    def lost(self) -> int:
        return max(0, (self.reached or 0) - self.newest_after)


@dataclass
class Proof:
    control: Job
    main: Job
    lives: list[Ended] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    verified: int = 0  # generations

    @property
    def kills(self) -> list[Ended]:
        return [life for life in self.lives if life.shot is not None]


def prove(folder: Path, job: Job, kills: int, seed: int, say: Callable[[str], None] = lambda text: None) -> Proof:
    """Runs the control and the main job below ``folder``. RuntimeError when a life fails by itself."""
    proof = Proof(replace(job, folder=folder / "control"), replace(job, folder=folder / "main"))
    for one in (proof.control, proof.main):
        one.prepare()
    say("control: one life, never killed")
    _finish(Life(proof.control))
    batches = len(merged(rows(proof.control, 0)))
    for shot in [*plan(kills, batches, seed), None]:
        before, known, left = newest_committed(proof.main), len(rows(proof.main, 0)), _newest_started(proof.main)
        life = Life(proof.main)
        if shot is None:
            _finish(life)
        else:
            fire(proof.main, life, shot, LIFE_TIMEOUT_S)
        ended = _look(proof.main, life, shot, before, known, left)
        proof.lives.append(ended)
        proof.problems += _check_life(proof.main, len(proof.lives), ended)
        say(_tell(len(proof.lives), ended))
    proof.problems += differences(proof.control, proof.main)
    proof.problems += _verify(proof)
    return proof


def newest_committed(job: Job) -> int:
    generations = Run.open(job.run).discover().generations
    return generations[0].id.step if generations else 0


def _finish(life: Life) -> None:
    code = life.wait(LIFE_TIMEOUT_S)
    if code != 0:
        raise RuntimeError(f"the job ended with exit code {code}; {life.log} ends:\n{life.output()[-3000:]}")


def _look(
    job: Job, life: Life, shot: Shot | None, before: int, known: int, left: tuple[int, int] | None
) -> Ended:
    """``known`` evidence files and the generation ``left`` were there before this life."""
    lives = rows(job, 0)
    mine = lives[known] if len(lives) > known else []
    newest = _newest_started(job)
    return Ended(
        shot=shot,
        newest_before=before,
        resumed=life.resumed_step() if mine else None,
        reached=mine[-1].step if mine else None,
        newest_after=newest_committed(job),
        mid_save=shot is not None and newest != left and newest not in _committed(job),
        evidence=known if mine else None,
    )


def _started(job: Job) -> list[tuple[int, int]]:
    """(life, step) of each generation that has a folder, oldest first."""
    names = [name.split("-") for name in Run.open(job.run).store.list_dirs("generations/")]
    return sorted((int(life), int(step)) for life, step in names)


def _newest_started(job: Job) -> tuple[int, int] | None:
    started = _started(job)
    return started[-1] if started else None


def _committed(job: Job) -> set[tuple[int, int] | None]:
    return {None, *((item.id.life, item.id.step) for item in Run.open(job.run).discover().generations)}


def _check_life(job: Job, number: int, ended: Ended) -> list[str]:
    """No torn generation was loaded, and no more was lost than one interval and the save in flight."""
    problems = []
    if ended.resumed is not None and ended.resumed != ended.newest_before:
        problems.append(f"life {number} went on from step {ended.resumed}, not from {ended.newest_before}")
    if ended.reached is not None and ended.shot is not None:
        own = [step for life, step in _started(job) if life == max(life for life, _ in _started(job))]
        begun = max([ended.newest_before, *(step for step in own if step <= ended.reached)])
        # In a bucket an upload that is under way is not to be seen.
        if ended.reached - begun > job.interval * (2 if job.bucket else 1):
            problems.append(f"life {number} reached step {ended.reached}, but began no save after step {begun}")
        if ended.lost > 2 * job.interval:
            problems.append(f"life {number} lost {ended.lost} steps at an interval of {job.interval}")
    return problems


def _verify(proof: Proof) -> list[str]:
    """Every committed generation of the main run, by digests, with the command that a user has."""
    command = [sys.executable, "-m", "spot_core.cli", "verify", proof.main.run, "--depth", "digests", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        return [f"spot verify ended with exit code {done.returncode}: {done.stdout}{done.stderr}"]
    proof.verified = len(json.loads(done.stdout)["generations"])
    return []


def _tell(number: int, ended: Ended) -> str:
    began = "took no step" if ended.resumed is None else f"went on from step {ended.resumed}"
    if ended.resumed == 0:
        began = "began at step 0"
    if ended.shot is None:
        return f"life {number}: {began}, finished at step {ended.reached}"
    return f"life {number}: {began}, killed {_how(ended)}" + (
        "" if ended.reached is None else f" at step {ended.reached}"
    )


def _how(ended: Ended) -> str:
    if ended.mid_save:
        return Kind.SAVE.value
    return Kind.START.value if ended.reached is None else Kind.STEP.value


def _table(proof: Proof) -> Table:
    table = Table(title="Lives of the job that was killed")
    for name in ("life", "went on from", "ended", "reached", "newest commit", "steps lost"):
        table.add_column(name, justify="left" if name == "ended" else "right")
    for number, life in enumerate(proof.lives, start=1):
        table.add_row(
            str(number),
            "-" if life.resumed is None else str(life.resumed),
            "finished" if life.shot is None else f"killed {_how(life)}",
            "-" if life.reached is None else str(life.reached),
            str(life.newest_after),
            "-" if life.shot is None else str(life.lost),
        )
    return table


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder for the two runs and the picture.")],
    kills: Annotated[int, typer.Option(min=0)] = 3,
    ranks: Annotated[int, typer.Option(min=1)] = 1,
    workers: Annotated[int, typer.Option(min=0)] = 0,
    accumulate: Annotated[int, typer.Option(min=1)] = 1,
    epochs: Annotated[int, typer.Option(min=1)] = 3,
    windows: Annotated[int, typer.Option(min=32)] = 3200,
    interval: Annotated[int, typer.Option(min=1, help="Optimizer steps between two saves.")] = 25,
    bucket: Annotated[str, typer.Option(help="Put the runs below this URI, such as s3://bucket/prefix.")] = "",
    seed: Annotated[int | None, typer.Option(help="Chooses the instants of the kills; at random by default.")] = None,
) -> None:
    """Kill the training, start it again with the same command, and compare it with a control bit for bit."""
    console = Console()
    if folder.exists() and any(folder.iterdir()):
        console.print(f"{folder} is not empty; name a new folder.")
        raise typer.Exit(2)
    seed = secrets.randbelow(1_000_000) if seed is None else seed
    console.print(f"kills: {kills}, --seed {seed} repeats them")
    job = Job(folder.resolve(), ranks, workers, accumulate, epochs, windows, interval, bucket=bucket)
    try:
        proof = prove(folder.resolve(), job, kills, seed, console.print)
    except RuntimeError as error:
        console.print(str(error), markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1) from error
    console.print(_table(proof))
    image = folder / "loss.png"
    draw(proof.control, proof.main, {life.evidence: _how(life) for life in proof.kills}, image)
    console.print(f"picture: {image}")
    if proof.problems:
        for problem in proof.problems:
            console.print(f"DIFFERS: {problem}", markup=False, soft_wrap=True)
        raise typer.Exit(1)
    console.print(
        f"Same as the control, bit for bit: weights, optimizer state, samples and losses of every batch, curves. "
        f"{proof.verified} committed generations pass `spot verify --depth digests`.",
        soft_wrap=True,
    )


if __name__ == "__main__":
    typer.run(main)
