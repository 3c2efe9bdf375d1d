"""Peak memory of a save, seen from outside: the proportional set size of the trainer and all its children."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import psutil

_EVERY_S = 0.02


def watched(command: list[str], folder: Path, environment: dict[str, str]) -> int | None:
    """Bytes at the peak above those when the state stood and nothing had been saved; None when the worker failed.

    Shared pages are counted once: each process's share of them.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if "ready" not in process.stdout.readline():
            process.kill()
            return None
        before = _proportional(process.pid)
        peak, over = [before], threading.Event()

        def sample() -> None:
            while not over.wait(_EVERY_S):
                peak.append(max(peak.pop(), _proportional(process.pid)))

        sampler = threading.Thread(target=sample)
        sampler.start()
        process.stdin.write("go\n")
        process.stdin.flush()
        answered = any(line.startswith("result ") for line in process.stdout)
        over.set()
        sampler.join()
    return peak[0] - before if answered else None


def _proportional(pid: int) -> int:
    total = 0
    try:
        parent = psutil.Process(pid)
        family = [parent, *parent.children(recursive=True)]
    except psutil.Error:
        return 0
    for process in family:
        try:
            total += process.memory_full_info().pss
        except psutil.Error:
            continue
    return total
