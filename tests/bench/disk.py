"""What the disk itself can do: the same number of bytes by O_DIRECT from memory that is ready, and nothing else."""

from __future__ import annotations

import itertools
import mmap
import os
import threading
import time
from pathlib import Path

BLOCK = 8 << 20
DEPTH = 4

_ready: dict[int, mmap.mmap] = {}


def raw_write(path: Path, nbytes: int) -> float:
    """Seconds to write and fsync `nbytes`, `DEPTH` writes of 8 MiB at a time; no digests, no copies.

    From as much memory as it writes: one block again and again comes from the processor's cache, which no file does.
    """
    padded = -(-nbytes // 4096) * 4096
    if padded not in _ready:
        _ready.clear()
        _ready[padded] = mmap.mmap(-1, padded)
        for start in range(0, padded, BLOCK):
            _ready[padded][start : start + BLOCK] = os.urandom(min(BLOCK, padded - start))
    data = memoryview(_ready[padded])
    began = time.perf_counter()
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
    try:
        direct = os.open(path, os.O_WRONLY | os.O_DIRECT)
    except OSError:
        direct = os.dup(fd)
    os.posix_fallocate(fd, 0, padded)
    offsets = iter(range(0, padded, BLOCK))
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                offset = next(offsets, None)
            if offset is None:
                return
            os.pwrite(direct, data[offset : offset + BLOCK], offset)

    threads = [threading.Thread(target=work) for _ in itertools.repeat(None, DEPTH)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    os.ftruncate(fd, nbytes)
    os.fsync(fd)
    took = time.perf_counter() - began
    os.close(direct)
    os.close(fd)
    path.unlink()
    return took


def forget_cached(folder: Path) -> None:
    """Drop the page cache of every file below, so that the next read comes from the disk."""
    for path in folder.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
