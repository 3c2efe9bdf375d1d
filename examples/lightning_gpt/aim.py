"""Chooses the instants of the kills and waits for them: seeded, some of them in the middle of a save."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

from lives import Job, Life

from spot_core.store import open_store

POLL_S = 0.0005


class Kind(str, Enum):
    START = "while starting"
    STEP = "between saves"
    SAVE = "mid-save"


@dataclass(frozen=True)
class Shot:
    kind: Kind
    batch: int  # not before this batch of the run
    delay_s: float  # after what was waited for


def plan(kills: int, batches: int, seed: int) -> list[Shot]:
    """``kills`` shots in the order of the batches they wait for, spread over a run of ``batches``.

    A third is aimed at a save, and from six on one in six at the start of a life (before it has taken a step).
    """
    chance = random.Random(seed)
    # The last tenth is left out: the run must not end before its kill.
    targets = sorted(chance.randint(1, max(1, batches * 9 // 10)) for _ in range(kills))
    shots = []
    for number, batch in enumerate(targets):
        if number % 3 == 1:
            shots.append(Shot(Kind.SAVE, batch, chance.uniform(0, 0.004)))
        elif number % 6 == 5:
            shots.append(Shot(Kind.START, batch, chance.uniform(0.5, 6)))
        else:
            shots.append(Shot(Kind.STEP, batch, chance.uniform(0, 0.05)))
    return shots


class Tail:
    """The newest batch number in the evidence of rank 0, read as it grows."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._known = set(folder.glob("rank0-life*.jsonl"))
        self._file: Path | None = None
        self._read = 0
        self.batch = -1

    def update(self) -> int:
        if self._file is None:
            new = set(self._folder.glob("rank0-life*.jsonl")) - self._known
            self._file = new.pop() if new else None
            if self._file is None:
                return self.batch
        with self._file.open("rb") as file:
            file.seek(self._read)
            lines = file.read().split(b"\n")
        self._read += sum(len(line) + 1 for line in lines[:-1])
        for line in lines[:-1]:
            self.batch = json.loads(line)["batch"]
        return self.batch


def open_generations(run: str) -> set[str]:
    """Generations with something written and no commit marker."""
    store = open_store(run)
    names = store.list_dirs("generations/")
    return {name for name in names if store.stat(f"generations/{name}/COMMIT.json") is None}


def fire(job: Job, life: Life, shot: Shot, timeout_s: float) -> None:
    """Waits for the instant that ``shot`` describes, then kills ``life``.

    Raises RuntimeError, with the end of the life's output, when it ends by itself before, or is late.
    """
    deadline = time.monotonic() + timeout_s
    if shot.kind is not Kind.START:
        tail = Tail(job.evidence)
        _until(life, deadline, lambda: tail.update() >= shot.batch)
    if shot.kind is Kind.SAVE:
        left_over = open_generations(job.run)
        _until(life, deadline, lambda: open_generations(job.run) - left_over)
    time.sleep(shot.delay_s)
    if not life.running():
        raise RuntimeError(f"the job ended before it was killed; {life.log} ends:\n{life.output()[-3000:]}")
    life.kill()


def _until(life: Life, deadline: float, reached: Callable[[], object]) -> None:
    while not reached():
        if not life.running():
            raise RuntimeError(f"the job ended before it was killed; {life.log} ends:\n{life.output()[-3000:]}")
        if time.monotonic() > deadline:
            life.kill()
            raise RuntimeError(f"the job did not get there in time; {life.log} ends:\n{life.output()[-3000:]}")
        time.sleep(POLL_S)
