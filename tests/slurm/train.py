"""The job that Slurm takes away and brings back: counts on several ranks, saves through the protocol when told to stop.

Usage: train.py RUN OUT STEPS SECONDS_PER_STEP. Every start adds a line {"life", "step"} to OUT/starts.jsonl; at the end
OUT/result.json holds what every rank has counted.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from spot_core.launch.stoprecord import StopRecord, leave_note, write_stop
from spot_core.parts import PartIndex, write_part
from spot_core.run import Run, Writer
from spot_core.verify import Depth

MODULUS = 2**31 - 1


def advance(state: list[int], step: int, rank: int, contributions: int) -> list[int]:
    """One step: [what all ranks share, what is this rank's own]."""
    shared, own = state
    return [(shared * 48271 + contributions + step) % MODULUS, (own * 16807 + rank + step) % MODULUS]


def contribution(step: int, rank: int) -> int:
    return (step * (rank + 3)) % 1009


def control(steps: int, world: int) -> list[list[int]]:
    """What an uninterrupted job counts, rank by rank."""
    states = [[1, rank + 1] for rank in range(world)]
    for step in range(1, steps + 1):
        total = sum(contribution(step, rank) for rank in range(world))
        states = [advance(state, step, rank, total) for rank, state in enumerate(states)]
    return states


def load(run: Run, rank: int) -> tuple[int, list[int]]:
    verified = run.select(Depth.DIGESTS).verified
    if verified is None:
        return 0, [1, rank + 1]
    part = verified.committed.manifest.parts[rank]
    at, size = PartIndex.read(run.store, part).objects["state"]
    buffer = bytearray(size)
    assert part.blob is not None
    run.store.get_ranges(part.blob.key, [(at, [memoryview(buffer)])])
    return verified.committed.id.step, json.loads(buffer)


def save(writer: Writer | None, run: Run, rank: int, step: int, state: list[int], meta: dict[str, Any]) -> None:
    opened: list[Any] = [None]
    if writer is not None:
        generation = writer.begin(step)
        opened = [[generation.target(r) for r in range(dist.get_world_size())]]
    dist.broadcast_object_list(opened)
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, write_part(run.store, opened[0][rank], rank, {"state": json.dumps(state).encode()}))
    if writer is not None:
        generation.seal(parts, world_size=len(parts)).commit(meta)
    dist.barrier()


def leave(code: int) -> NoReturn:
    sys.stdout.flush()
    dist.barrier()
    os._exit(code)


def main() -> None:
    run, out, steps, pause = Run.open(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    told: list[str] = []
    for each in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(each, lambda signum, frame: told.append(signal.Signals(signum).name))
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    step, state = load(run, rank)
    dist.barrier()
    writer = run.claim() if rank == 0 else None
    life: list[Any] = [writer.life if writer else None]
    dist.broadcast_object_list(life)
    if rank == 0:
        with (out / "starts.jsonl").open("a") as starts:
            starts.write(json.dumps({"life": life[0], "step": step}) + "\n")
    dist.barrier()

    while step < steps:
        time.sleep(pause)
        both = torch.tensor([contribution(step + 1, rank), len(told)], dtype=torch.int64)
        dist.all_reduce(both)
        step += 1
        state = advance(state, step, rank, int(both[0]))
        if both[1]:
            code = int(os.environ["SPOT_EXIT_CODE"])
            save(writer, run, rank, step, state, {"reason": "stop"})
            record = StopRecord(life=life[0], step=step, reason=" ".join(told) or "another rank", exit_code=code)
            if writer is not None:
                write_stop(run.store, record)
            dist.barrier()
            leave_note(record)
            print(f"rank {rank} stops at step {step}: {record.reason}")
            leave(code)

    states: list[Any] = [None] * world
    dist.all_gather_object(states, state)
    save(writer, run, rank, step, state, {"finished": True})
    if rank == 0:
        (out / "result.json").write_text(json.dumps(states))
    leave(0)


if __name__ == "__main__":
    main()
