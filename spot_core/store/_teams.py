"""Threads that write one file together, kept for the next file.

To start a thread is to wait until it runs, which takes milliseconds where the cores are busy with the training: at a
moment when the disk has nothing to do. A team belongs to one file at a time, so that one that hangs holds up no other.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

__all__ = ["team"]

_idle: dict[tuple[int, int], list[ThreadPoolExecutor]] = {}
"""By process (a forked one has none of these threads) and size; at most one of each."""


@contextmanager
def team(size: int) -> Iterator[ThreadPoolExecutor]:
    """`size` threads for the block alone, which leaves nothing running in them. After an error they are ended."""
    idle = _idle.setdefault((os.getpid(), size), [])
    try:
        lent = idle.pop()  # whole or not at all, whichever threads come at the same time
    except IndexError:
        lent = ThreadPoolExecutor(size, thread_name_prefix="spot-io")
    try:
        yield lent
    except BaseException:
        lent.shutdown()
        raise
    if idle:
        lent.shutdown()
    else:
        idle.append(lent)
