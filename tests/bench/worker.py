"""One contestant in a process of its own: `python -m tests.bench.worker '{"task": ..., ...}'` prints one JSON line.

A step's time is taken around the step alone. Blocked time is the time inside the save call and inside the wait before
the optimizer's update. Lost time of a save is what the steps from its call to its end took in excess of as many
undisturbed steps, the call included; the undisturbed steps stand right before and right after it (their median).
"""

from __future__ import annotations

import contextlib
import json
import logging
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from tests.bench.contestants import CONTESTANTS, Contestant
from tests.bench.disk import raw_write
from tests.bench.model import Launches, Training, tensor_bytes
from tests.bench.restore import restore_times

warnings.simplefilter("ignore")


class Clocked:
    """Calls and times one contestant."""

    def __init__(self, name: str, training: Any, folder: Path) -> None:
        self.folder = folder
        self._training = training
        self._number = 0
        self.contestant: Contestant = CONTESTANTS[name](training)
        self.waited = 0.0
        if hasattr(self.contestant, "start"):
            self.contestant.start(folder / "run", tensor_bytes(training.state()))

    def step(self) -> float:
        began = time.perf_counter()
        self._training.step(self._before_update)
        return time.perf_counter() - began

    def _before_update(self) -> None:
        began = time.perf_counter()
        self.contestant.before_update()
        self.waited += time.perf_counter() - began

    def save(self) -> tuple[float, float]:
        """When the call began and how long it took."""
        self._number += 1
        self.waited = 0.0
        began = time.perf_counter()
        self.contestant.save(self._training.state(), self.folder / f"save{self._number}")
        return began, time.perf_counter() - began

    def finish(self) -> float:
        while (ended := self.contestant.ended()) is None:
            time.sleep(0.001)
        return ended

    def forget(self) -> None:
        """Free the disk, and its queue, before the next save."""
        shutil.rmtree(self.folder / f"save{self._number}", ignore_errors=True)


@contextlib.contextmanager
def clocked(job: dict[str, Any], training: Any) -> Iterator[Clocked]:
    folder = Path(tempfile.mkdtemp(prefix="spot-bench-", dir=job["dir"]))
    clock = Clocked(job["contestant"], training, folder)
    try:
        yield clock
    finally:
        clock.contestant.close()
        shutil.rmtree(folder, ignore_errors=True)


def saves(job: dict[str, Any]) -> dict[str, Any]:
    """Saves of the transformer under training; the first one apart, since it may have to set things up."""
    training = Training(job["size"])
    training.step()
    found: list[dict[str, float]] = []
    with clocked(job, training) as clock:
        before = [clock.step() for _ in range(job["steps"])]
        for _ in range(job["saves"] + 1):
            began, call = clock.save()
            steps = [clock.step()]
            while clock.contestant.ended() is None:
                steps.append(clock.step())
            total = time.perf_counter() - began
            durable = clock.finish() - began
            blocked = call + clock.waited
            clock.forget()
            raw = raw_write(clock.folder / "raw", tensor_bytes(training.state())) if job["raw"] else None
            after = [clock.step() for _ in range(job["steps"])]
            calm = statistics.median(before + after)
            one = {"blocked": blocked, "lost": total - calm * len(steps), "durable": durable, "step": calm}
            found.append(one if raw is None else {**one, "raw": raw})
            before = after
        synced = clock.contestant.synced
    return {"first": found[0], "saves": found[1:], "bytes": tensor_bytes(training.state()), "synced": synced}


def launches(job: dict[str, Any]) -> dict[str, Any]:
    """The launch-bound loop: how much longer an iteration takes while a save is in flight."""
    training = Launches(job["tensors"], job["bytes"])
    found: list[dict[str, float]] = []
    with clocked(job, training) as clock:
        for _ in range(job["saves"] + 1):
            calm = [clock.step() for _ in range(15)]
            began, call = clock.save()
            busy: list[float] = []
            while clock.contestant.ended() is None:
                busy.append(clock.step())
            durable = clock.finish() - began
            clock.forget()
            calm += [clock.step() for _ in range(15)]
            base = statistics.median(calm)
            if busy:
                found.append(
                    {
                        "mean": statistics.mean(busy) / statistics.mean(calm),
                        "worst": max(busy) / base,
                        "blocked": call,
                        "durable": durable,
                    }
                )
    return {"saves": found[1:]}


def memory(job: dict[str, Any]) -> dict[str, Any]:
    """Steps without and then with saves, for the orchestrator to look at from outside."""
    training = Training(job["size"])
    for _ in range(4):
        training.step()
    training.state()
    print("calm over", flush=True)
    sys.stdin.readline()
    with clocked(job, training) as clock:
        for _ in range(job["saves"]):
            clock.step()
            clock.save()
            clock.step()
            clock.finish()
            clock.forget()
    return {"bytes": tensor_bytes(training.state())}


def restore(job: dict[str, Any]) -> dict[str, Any]:
    return restore_times(Training(job["size"]), Path(job["dir"]), job["saves"])


TASKS: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "saves": saves,
    "launches": launches,
    "memory": memory,
    "restore": restore,
}


def main() -> None:
    logging.basicConfig(level=logging.ERROR)
    job = json.loads(sys.argv[1])
    torch.set_num_threads(job["threads"])
    print("result " + json.dumps(TASKS[job["task"]](job)), flush=True)


if __name__ == "__main__":  # the process executor of dcp imports this file again in its child
    main()
