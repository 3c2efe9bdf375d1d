"""A training loop on the core alone, without torch: `python chaos_plain.py OUT WRITER`. Quick, so many crash points."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

from spot_core.retention import Retention
from spot_core.run import Run
from spot_core.verify import Depth
from spot_core.writer import WriteJob, WriterClient

STEPS, INTERVAL, SIZE = 20, 4, 300_000


def train(state: bytes, step: int) -> bytes:
    """A step that depends on all of the state, so that any wrong byte shows at the end."""
    return hashlib.shake_256(state + step.to_bytes(4, "big")).digest(SIZE)


def main() -> None:
    out, mode = Path(sys.argv[1]), sys.argv[2]
    run = Run.open(out / "run")
    found = run.select(Depth.DIGESTS).verified
    state, done = (b"seed", 0) if found is None else (found.read("state"), found.committed.id.step)
    print(f"resumed from step {done}" if done else "fresh start")
    writer = run.claim(info={})
    client = WriterClient.start(run.store, mode=mode)
    for step in range(done + 1, STEPS + 1):
        state = train(state, step)
        if step % INTERVAL:
            continue
        opened = writer.begin(step)
        slab = client.arm(len(state))
        job = WriteJob(0, opened.target(0), len(state), {"objects": {"state": [0, len(state)]}})
        future = client.submit(job)
        slab.data[: len(state)] = state
        client.advance(len(state))
        opened.seal([future.result()], world_size=1).commit({"reason": "interval"})
        writer.prune(Retention(100))
    client.close()
    unfinished = out / "final.part"
    unfinished.write_bytes(state)
    os.replace(unfinished, out / "final.bin")


if __name__ == "__main__":
    main()
