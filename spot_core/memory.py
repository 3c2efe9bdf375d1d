"""Will a snapshot fit in this machine's memory? Asked before the first save, so that it is said at the start."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from pathlib import Path

import psutil

log = logging.getLogger(__name__)

CGROUP = Path("/sys/fs/cgroup")
_LIMITS = (("memory.max", "memory.current"), ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"))


def available_bytes(cgroup: Path = CGROUP) -> int:
    """What the machine has left, or the container if that is less."""
    left = int(psutil.virtual_memory().available)
    for limit, used in _limits(cgroup):
        left = min(left, max(limit - used, 0))
    return left


def total_bytes(cgroup: Path = CGROUP) -> int:
    """What the machine has, or the container may take if that is less."""
    return min([int(psutil.virtual_memory().total), *(limit for limit, _ in _limits(cgroup))])


def _limits(cgroup: Path) -> Iterator[tuple[int, int]]:
    """Limit and usage of the control group, in bytes."""
    for limit, usage in _LIMITS:
        try:
            # "max" (no limit) is no number; version 1 writes a huge one instead.
            yield int((cgroup / limit).read_text()), int((cgroup / usage).read_text())
        except (OSError, ValueError):
            continue


def local_world_size() -> int:
    """Ranks on this machine, as the launcher says; 1 when it does not."""
    return max(1, int(os.environ.get("LOCAL_WORLD_SIZE") or 1))


def fits(snapshot_bytes: int, *, ranks: int | None = None, available: int | None = None) -> bool:
    """Whether one staging copy of `snapshot_bytes` per rank of this machine fits; says so in the log when not."""
    ranks = local_world_size() if ranks is None else ranks
    available = available_bytes() if available is None else available
    needed = snapshot_bytes * ranks
    if needed <= available:
        if os.environ.get("LOCAL_RANK", "0") == "0":  # it speaks of the whole machine
            log.info("spot: a snapshot takes %s of %s free memory", _size(needed), _size(available))
        return True
    log.warning(
        "spot: this run will not fit: a snapshot needs %s of memory (%s for each of %d ranks on this machine), %s are "
        "free. The first save may end the process. Shard the state over more machines, or give the job more memory.",
        _size(needed),
        _size(snapshot_bytes),
        ranks,
        _size(available),
    )
    return False


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.2f} GiB" if nbytes >= 2**27 else f"{nbytes / 2**20:.1f} MiB"
