"""One of four ranks that load what one rank saved: `python -m tests.pytorch.reshard_rank RANK RUN`; prints JSON.

A load communicates with nobody, so torch's fake process group is all that the mesh needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from spot_core.pytorch.loader import load
from spot_core.run import Run
from spot_core.store import open_store
from spot_core.testing import StoreWrapper

WORLD, ROWS, WIDTH, TENSORS = 4, 16000, 1024, 12  # 62 MB each: chunks do not end where shards do


def tensor(number: int) -> torch.Tensor:
    return torch.arange(ROWS * WIDTH, dtype=torch.float32).view(ROWS, WIDTH) + number


class Counting(StoreWrapper):
    """Counts the bytes read from blobs."""

    nbytes = 0

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        self.nbytes += sum(len(buffer) for _, buffers in ranges for buffer in buffers)
        super().get_ranges(key, ranges, threads=threads)


def resident(what: str) -> int:
    """Bytes: ``VmRSS`` now, or ``VmHWM`` at most since the start."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(what))


def main() -> None:
    rank, uri = int(sys.argv[1]), sys.argv[2]
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    store = Counting(open_store(uri))
    run = Run.open(store)
    verified = run.verify(run.discover().generations[0])
    rows, first = ROWS // WORLD, rank * ROWS // WORLD
    before = resident("VmRSS")
    shards = {f"w{i}": torch.zeros(rows, WIDTH) for i in range(TENSORS)}
    template = {
        name: DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, WIDTH)), stride=(WIDTH, 1)
        )
        for name, local in shards.items()
    }
    load(store, verified, rank=rank, world=WORLD, template={"model": template})
    peak = resident("VmHWM") - before
    right = all(torch.equal(local, tensor(i)[first : first + rows]) for i, local in enumerate(shards.values()))
    shard = sum(local.nbytes for local in shards.values())
    print(json.dumps({"right": right, "shard": shard, "read": store.nbytes, "peak": peak}))


if __name__ == "__main__":
    main()
