"""One of four ranks that load what one rank saved: `python -m tests.pytorch.reshard_rank RANK RUN SMALL TENSORS`.

Prints JSON. First it loads the run SMALL, for all that a process's first load brings along once: libraries, threads,
arenas. A load communicates with nobody, so torch's fake process group is all that the mesh needs.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from spot_core.pytorch.loader import load
from spot_core.run import Run
from spot_core.store import Store, open_store
from spot_core.testing import StoreWrapper

WORLD, ROWS, SMALL_ROWS, WIDTH = 4, 16000, 16, 1024  # 66 MB each: chunks do not end where shards do


def tensor(number: int, rows: int = ROWS) -> torch.Tensor:
    return torch.arange(rows * WIDTH, dtype=torch.float32).view(rows, WIDTH) + number


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


def resharded(rank: int, mesh: DeviceMesh, store: Store, tensors: int, rows: int) -> dict[str, torch.Tensor]:
    """This rank's rows of each tensor."""
    run = Run.open(store)
    verified = run.verify(run.discover().generations[0])
    shards = {f"w{i}": torch.zeros(rows // WORLD, WIDTH) for i in range(tensors)}
    template = {
        name: DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=torch.Size((rows, WIDTH)), stride=(WIDTH, 1)
        )
        for name, local in shards.items()
    }
    load(store, verified, rank=rank, world=WORLD, template={"model": template})
    return shards


def main() -> None:
    rank, uri, small, tensors = int(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=rank, world_size=WORLD, store=FakeStore())
    mesh = init_device_mesh("cpu", (WORLD,))
    at_first = resident("VmRSS")
    resharded(rank, mesh, open_store(small), 1, SMALL_ROWS)
    store, before = Counting(open_store(uri)), resident("VmRSS")
    shards = resharded(rank, mesh, store, tensors, ROWS)
    most = resident("VmHWM")
    rows, first = ROWS // WORLD, rank * ROWS // WORLD
    right = all(torch.equal(local, tensor(i)[first : first + rows]) for i, local in enumerate(shards.values()))
    shard = sum(local.nbytes for local in shards.values())
    said = {"right": right, "shard": shard, "read": store.nbytes, "peak": most - before, "once": before - at_first}
    print(json.dumps(said))


if __name__ == "__main__":
    main()
