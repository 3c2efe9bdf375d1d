"""The benchmark: `python -m tests.bench`. A table, the goals, and with `--json FILE` every number.

Contestants run in turns, each turn in a process of its own, so that a machine that gets slower for a minute slows all
of them. Use an idle machine: with other work on the cores only the ratios mean something, and those not much.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from tests.bench.contestants import CONTESTANTS, SPOT
from tests.bench.memory import watched
from tests.bench.report import report

ROOT = Path(__file__).resolve().parents[2]
LAUNCH_CONTESTANTS = [
    "Lightning AsyncCheckpointIO",
    "dcp.async_save cached",
    "dcp.async_save process cached",
    "spot (thread)",
    SPOT,
]
SMALL_TENSORS, SMALL_BYTES = 8000, 250_000_000
LAUNCH_SAVES = 8
MINUTES = 60

app = typer.Typer(add_completion=False)
console = Console(stderr=True)


def command(job: dict[str, Any]) -> list[str]:
    return [sys.executable, "-m", "tests.bench.worker", json.dumps(job)]


def run(job: dict[str, Any], timeout_s: float) -> dict[str, Any] | None:
    """One worker's answer; None, with its last words shown, when it failed."""
    console.log(f"{job['task']} {job.get('size', '')} {job['contestant']}")
    try:
        done = subprocess.run(
            command(job), capture_output=True, text=True, timeout=timeout_s, cwd=ROOT, env=environment(), check=False
        )
    except subprocess.TimeoutExpired:
        console.log(f"[red]{job['contestant']} took more than {timeout_s:.0f} s[/]")
        return None
    answers = [line for line in done.stdout.splitlines() if line.startswith("result ")]
    if not answers:
        console.log(f"[red]{job['contestant']} failed[/]: {done.stderr[-2000:]}")
        return None
    answer: dict[str, Any] = json.loads(answers[-1].removeprefix("result "))
    return answer


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}


@app.command()
def bench(
    size: Annotated[list[str] | None, typer.Option(help="State sizes: 10M, 100M, 1G; default 100M and 1G.")] = None,
    saves: Annotated[int, typer.Option(min=1, help="Saves per contestant and turn, the first one not counted.")] = 4,
    turns: Annotated[int, typer.Option(min=1, help="How often each contestant runs.")] = 2,
    steps: Annotated[int, typer.Option(min=1, help="Undisturbed steps before and after each save.")] = 5,
    threads: Annotated[int, typer.Option(min=1, help="Compute threads of the training.")] = 1,
    only: Annotated[list[str] | None, typer.Option(help="Contestants to run (default: all).")] = None,
    part: Annotated[list[str] | None, typer.Option(help="saves, launches, memory, restore; default all.")] = None,
    folder: Annotated[Path | None, typer.Option(help="Where to write: on the disk to be measured.")] = None,
    out: Annotated[Path | None, typer.Option("--json", help="Write all numbers here.")] = None,
) -> None:
    """Compare saving with this package to the stock ways, on this machine."""
    size, part = size or ["100M", "1G"], part or ["saves", "launches", "memory", "restore"]
    where = str(folder or tempfile.gettempdir())
    names = only or list(CONTESTANTS)
    unknown = sorted(set(names) - set(CONTESTANTS))
    if unknown:
        raise typer.BadParameter(f"unknown contestants {unknown}; there are {list(CONTESTANTS)}")
    common = {"threads": threads, "steps": steps, "dir": where}
    numbers: dict[str, Any] = {"machine": machine(where), "threads": threads, "saves": {}, "launches": {}}
    for one in size if "saves" in part else ():
        table: dict[str, Any] = numbers["saves"].setdefault(one, {})
        for _ in range(turns):
            for name in names:
                job = {"task": "saves", "contestant": name, "size": one, "saves": saves, "raw": name == SPOT, **common}
                collect(table, name, run(job, 20 * MINUTES))
    if "launches" in part:
        for _ in range(turns):
            for name in (n for n in names if n in LAUNCH_CONTESTANTS):
                small = {"tensors": SMALL_TENSORS, "bytes": SMALL_BYTES}
                job = {"task": "launches", "contestant": name, "saves": LAUNCH_SAVES, **small, **common}
                collect(numbers["launches"], name, run(job, 20 * MINUTES))
    if "memory" in part:
        numbers["memory"] = {}
        for name in names:
            job = {"task": "memory", "contestant": name, "size": size[-1], "saves": 2, **common}
            console.log(f"memory {size[-1]} {name}")
            numbers["memory"][name] = watched(command(job), ROOT, environment())
    if "restore" in part:
        numbers["restore"] = {
            one: run({"task": "restore", "contestant": SPOT, "size": one, "saves": 5, **common}, 20 * MINUTES)
            for one in size
        }
    if out is not None:
        out.write_text(json.dumps(numbers, indent=1) + "\n")
    report(numbers, Console())


def collect(table: dict[str, Any], name: str, answer: dict[str, Any] | None) -> None:
    """Put a turn's answer to those of the same contestant."""
    if answer is None:
        table.setdefault(name, {"saves": [], "firsts": []})["failed"] = True
        return
    entry = table.setdefault(name, {"saves": [], "firsts": []})
    entry["saves"] += answer.pop("saves")
    if "first" in answer:
        entry["firsts"].append(answer.pop("first"))
    entry.update(answer)


def machine(where: str) -> dict[str, Any]:
    import torch

    stat = subprocess.run(["stat", "-f", "-c", "%T", where], capture_output=True, text=True, check=False)
    return {
        "system": platform.platform(),
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "torch": torch.__version__,
        "folder": where,
        "file system": stat.stdout.strip(),
    }


if __name__ == "__main__":
    app()
