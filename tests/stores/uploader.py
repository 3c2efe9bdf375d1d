"""One life that saves until it is killed: `python -m tests.stores.uploader URI`, storage options as JSON on stdin.

Says ``writer PID`` once, and ``committed STEP`` after each commit. With a second argument it stops after so many.
"""

from __future__ import annotations

import json
import sys

from spot_core import Depth, Retention, Run
from spot_core.store import open_store
from spot_core.writer import WriteJob, WriterClient

SIZE = 40_000_000  # three parts


def main(uri: str, saves: int) -> None:
    run = Run.open(open_store(uri, storage_options=json.loads(sys.stdin.readline())))
    verified = run.select(Depth.DIGESTS).verified
    step = 0 if verified is None else verified.committed.id.step
    writer = run.claim()
    client = WriterClient.start(run.store, mode="process")
    print("writer", client.pid, flush=True)
    for _ in range(saves):
        step += 1
        opened = writer.begin(step)
        slab = client.arm(SIZE)
        slab.data[:SIZE] = bytes([step % 256]) * SIZE
        future = client.submit(WriteJob(rank=0, target=opened.target(0), size=SIZE, index={}))
        client.advance(SIZE)
        opened.seal([future.result()], world_size=1).commit({})
        print("committed", step, flush=True)
        writer.prune(Retention(keep=2))
    client.close()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 1 << 30)
