"""What agreement costs per step: ``python -m tests.bench.agreement [--ranks 4] [--steps 3000] [--json FILE]``.

Each rank times one call per step, between steps of about a millisecond without communication: freeze-and-publish,
the lagged all-reduce, a blocking all-reduce, and no agreement (the timer itself). All in one run, in turns, so that the
ratios hold on a busy machine.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table

from spot_core.pytorch.agree import FreezeAgreement
from spot_core.pytorch.channel import Channel
from spot_core.pytorch.lagged import LaggedAgreement
from spot_core.pytorch.ranks import Ranks

ROOT = Path(__file__).parents[2]
TURNS = 5
STEP_S = 0.001


def measure(rank: int, world: int, port: int, steps: int) -> dict[str, Any]:
    """Seconds per call: {kind: {"wall": [...], "cpu": mean}} of this rank."""
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, world, False, timeout=timedelta(seconds=60))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    group, side = dist.new_group(backend="gloo"), dist.new_group(backend="gloo")
    freeze = FreezeAgreement(Channel.open(Ranks(rank, world, group)))
    lagged = LaggedAgreement(side)
    flag = torch.zeros(1, dtype=torch.int32)
    kinds: dict[str, Callable[[int], object]] = {
        "none": lambda _step: None,
        "freeze": freeze.boundary,
        "lagged": lagged.boundary,
        "all_reduce": lambda _step: dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=group),
    }
    wall: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu = dict.fromkeys(kinds, 0.0)
    step = 0
    for _ in range(TURNS):
        for kind, call in kinds.items():
            dist.barrier(group=group)
            for _ in range(steps // TURNS):
                step += 1
                time.sleep(STEP_S)
                began, cpu_began = time.perf_counter(), time.process_time()
                call(step)
                wall[kind].append(time.perf_counter() - began)
                cpu[kind] += time.process_time() - cpu_began
    dist.barrier(group=group)
    freeze.close()
    return {kind: {"wall": wall[kind], "cpu": cpu[kind] / len(wall[kind])} for kind in kinds}


def summary(ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for kind in ranks[0]:
        wall = sorted(value for rank in ranks for value in rank[kind]["wall"])
        rows.append(
            {
                "kind": kind,
                "median_us": 1e6 * statistics.median(wall),
                "p95_us": 1e6 * wall[int(0.95 * len(wall))],
                "cpu_us": 1e6 * statistics.mean(rank[kind]["cpu"] for rank in ranks),
            }
        )
    nothing = rows[0]["median_us"]
    for row in rows:
        row["share_of_1ms_step"] = (row["median_us"] - nothing) / 1000
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        print(json.dumps(measure(options.rank, options.ranks, options.port, options.steps)))
        return
    server = dist.TCPStore("127.0.0.1", 0, options.ranks, True, wait_for_workers=False)
    command = [sys.executable, "-m", "tests.bench.agreement", "--ranks", str(options.ranks)]
    command += ["--steps", str(options.steps), "--port", str(server.port)]
    workers = [
        subprocess.Popen([*command, "--rank", str(rank)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
        for rank in range(options.ranks)
    ]
    rows = summary([json.loads(worker.communicate()[0]) for worker in workers])
    table = Table(title=f"agreement per step, {options.ranks} gloo ranks, microseconds")
    for name in ("", "median", "p95", "CPU", "share of a 1 ms step"):
        table.add_column(name, justify="left" if not name else "right")
    for row in rows:
        table.add_row(
            row["kind"],
            *(f"{row[key]:.1f}" for key in ("median_us", "p95_us", "cpu_us")),
            f"{row['share_of_1ms_step']:.2%}",
        )
    Console().print(table)
    freeze, reduce = rows[1], rows[3]
    print(f"all_reduce / freeze: {reduce['median_us'] / freeze['median_us']:.0f}x (medians)")
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
