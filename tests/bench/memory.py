"""Peak memory of a save, seen from outside: the proportional set size of the trainer and all its children."""

from __future__ import annotations

import subprocess
import threading
from pathlib import Path

import psutil

_EVERY_S = 0.02


def watched(command: list[str], folder: Path, environment: dict[str, str]) -> int | None:
    """Bytes at the peak of steps with saves above the peak of steps without; None when the worker failed.

    Shared pages are counted once: each process's share of them.
    """
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=folder, env=environment
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        with _Peak(process.pid) as calm:
            if "calm over" not in process.stdout.readline():
                process.kill()
                return None
        with _Peak(process.pid) as saving:
            process.stdin.write("go\n")
            process.stdin.flush()
            answered = any(line.startswith("result ") for line in process.stdout)
    return saving.bytes - calm.bytes if answered else None


class _Peak:
    """Watches a process and its children from a thread."""

    def __init__(self, pid: int) -> None:
        self.bytes = 0
        self._pid = pid
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> _Peak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        while not self._over.wait(_EVERY_S):
            self.bytes = max(self.bytes, _proportional(self._pid))


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
