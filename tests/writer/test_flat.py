"""Many saves in one run: memory and file descriptors of trainer and writer stay flat, threads too."""

from __future__ import annotations

import threading

import psutil
import pytest
import torch

from spot_core.pytorch.stage import Stager, storage_ids
from spot_core.store import Store
from spot_core.writer import WriterClient

from ._snapshot import plan_of, save

SAVES = 200
WARM = 20
MIB = 1 << 20


@pytest.mark.slow
def test_two_hundred_saves(client: WriterClient, stager: Stager, store: Store) -> None:
    tensors = [torch.randn(100_000) for _ in range(20)]
    processes = [psutil.Process(), psutil.Process(client.pid)]
    seen: list[tuple[int, list[int], list[int]]] = []
    for step in range(SAVES):
        # As a session does it: new objects each time, a size that varies a little.
        extra = torch.zeros(1000 + step % 7, dtype=torch.uint8)
        future, where = save(client, stager, plan_of([*tensors, extra]), storage_ids(tensors), step)
        stager.wait_staged()
        future.result(60)
        store.delete(where.blob_key)
        store.delete(where.index_key)
        if step >= WARM:
            seen.append(
                (
                    threading.active_count(),
                    [process.num_fds() for process in processes],
                    [process.memory_info().rss // MIB for process in processes],
                )
            )
    threads, fds, memory = zip(*seen, strict=True)
    assert max(threads) <= threads[0] + 1
    assert {max(f) - min(f) for f in zip(*fds, strict=True)} <= {0, 1, 2, 3}
    first, last = memory[0], memory[-1]
    assert all(end - begin <= 8 for begin, end in zip(first, last, strict=True)), f"{first} -> {last} MiB"
