"""A trainer for the tests of DataLoader workers: prints what happens, and goes on when a line comes in."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import torch
from torch.utils.data import DataLoader, Dataset

from spot_core.pytorch.workers import protect


class Numbers(Dataset):
    def __init__(self, stuck: bool) -> None:
        self.stuck = stuck

    def __len__(self) -> int:
        return 32

    def __getitem__(self, i: int) -> torch.Tensor:
        if self.stuck and i == 31:
            time.sleep(10_000)
        return torch.tensor([i, os.getpid()])


def say(*words: object) -> None:
    print(*words, flush=True)


def pause() -> None:
    if sys.stdin.readline() != "go\n":
        raise SystemExit("the test is gone")


def announce(worker_id: int) -> None:
    """The user's own worker_init_fn; a program that it starts has to be open to SIGTERM."""
    child = subprocess.Popen([sys.executable, "-c", "import signal; print(1, flush=True); signal.pause()"], stdout=-1)
    child.stdout.read(2)
    child.terminate()
    say("init", worker_id, child.wait())


def main(method: str, persistent: bool, protected: bool, stuck: bool, ending: str) -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, lambda signum, frame: None)
    signal.signal(signal.SIGUSR1, lambda signum, frame: None)
    loader = DataLoader(
        Numbers(stuck),
        batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
        persistent_workers=persistent,
        worker_init_fn=announce,
    )
    if protected:
        protect(loader)
    for _ in range(2 if persistent and ending == "loop" else 1):
        seen, pids = [], set()
        batches = iter(loader)
        for at in range(15 if stuck else 16):
            batch = next(batches)
            seen += batch[:, 0].tolist()
            pids |= set(batch[:, 1].tolist())
            if at == 1:
                say("pids", *sorted(pids))
                pause()
        say("seen", seen == list(range(30 if stuck else 32)), len(pids))
    if ending == "delete":
        del batches
        if persistent:
            del loader
    elif ending == "wait":
        pause()
    say("end")


if __name__ == "__main__":
    method, persistent, protected, stuck, ending = sys.argv[1:]
    main(method, persistent == "1", protected == "1", stuck == "1", ending)
