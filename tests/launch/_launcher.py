"""Starts real `spot launch` processes and looks at what became of their workers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

WORKER = Path(__file__).with_name("worker.py")
SPOT = [sys.executable, "-m", "spot_core.cli", "launch"]
PATIENCE_S = 150.0


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def wait_for(what: Callable[[], Any], why: str) -> Any:
    until = time.monotonic() + PATIENCE_S
    while not (found := what()):
        assert time.monotonic() < until, f"never happened: {why}"
        time.sleep(0.02)
    return found


class Job:
    """One `spot launch` and the logs of its workers (those of other launchers in the same folder too)."""

    def __init__(self, folder: Path, process: subprocess.Popen[str]) -> None:
        self.folder, self.process = folder, process

    def log(self, rank: int) -> list[str]:
        path = self.folder / f"{rank}.log"
        return path.read_text().splitlines() if path.exists() else []

    def said(self, rank: int, word: str) -> list[str]:
        return [line.partition(" ")[2] for line in self.log(rank) if line.split(" ")[0] == word]

    def signals(self, rank: int) -> list[str]:
        return self.said(rank, "signal")

    def pids(self) -> list[int]:
        logs = (self.log(int(path.stem)) for path in self.folder.glob("*.log"))
        return [int(line.split()[1]) for log in logs for line in log if line.startswith("start ")]

    def started(self, ranks: int = 2, attempt: int = 0) -> Job:
        def all_are() -> bool:
            return all(any(s.endswith(f" {attempt}") for s in self.said(r, "start")) for r in range(ranks))

        def is_so() -> bool:
            assert all_are() or self.process.poll() is None, f"ended early: {self.output()}"
            return all_are()

        wait_for(is_so, f"attempt {attempt} of {ranks} workers starts")
        return self

    def tell(self, signum: int) -> Job:
        self.process.send_signal(signum)
        return self

    def wait_signals(self, rank: int, count: int) -> Job:
        wait_for(lambda: len(self.signals(rank)) >= count, f"rank {rank} sees {count} signals")
        return self

    def output(self) -> str:
        return self.process.communicate(timeout=PATIENCE_S)[0]

    def code(self) -> int:
        """Exit code of the launcher; every worker has to be gone with it."""
        output = self.output()
        print(output)  # shown by pytest when the test fails
        assert alive(self.pids()) == []
        return self.process.returncode


def alive(pids: list[int]) -> list[int]:
    found = []
    for pid in pids:
        try:
            if psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
                found.append(pid)
        except psutil.NoSuchProcess:
            continue
    return found


@contextmanager
def spot_launch(
    folder: Path, plan: dict[str, Any], *options: str, args: tuple[str, ...] = (), env: dict[str, str] | None = None
) -> Iterator[Job]:
    """Runs worker.py with `plan` under `spot launch options`; ends what is left of it at the end."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SPOT_", "PET_", "TORCHELASTIC_", "SLURM_"))}
    command = [*SPOT, *options, "--", str(WORKER), str(folder), json.dumps(plan), *args]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**clean, "OMP_NUM_THREADS": "1", **(env or {})},
    )
    job = Job(folder, process)
    try:
        yield job
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
        for pid in alive(job.pids()):
            os.kill(pid, signal.SIGKILL)
