"""One life that saves until it is killed: `python -m tests.stores.uploader URI BYTES`, with options as JSON on stdin.

Says ``writer PID`` once, and ``committed STEP`` after each commit. With a third argument it stops after so many.
"""

from __future__ import annotations

import json
import sys

from spot_core import Depth, Retention, Run
from spot_core.store import open_store
from spot_core.writer import WriteJob, WriterClient


def main(uri: str, size: int, saves: int) -> None:
    run = Run.open(open_store(uri, storage_options=json.loads(sys.stdin.readline())))
    verified = run.select(Depth.DIGESTS).verified
    step = 0 if verified is None else verified.committed.id.step
    writer = run.claim()
    client = WriterClient.start(run.store, mode="process")
    print("writer", client.pid, flush=True)
    for _ in range(saves):
        step += 1
        opened = writer.begin(step)
        slab = client.arm(size)
        slab.data[:size] = bytes([step % 256]) * size
        future = client.submit(WriteJob(rank=0, target=opened.target(0), size=size, index={}))
        client.advance(size)
        opened.seal([future.result()], world_size=1).commit({})
        print("committed", step, flush=True)
        writer.prune(Retention(keep=2))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 1 << 30)
