"""`python -m tests.bench.frozen`: a LoRA-like state, most of it frozen. What does a later generation cost?

Three contestants, in turns: the trained part alone, as if there were no base; the whole state with nothing said of
what is frozen; and with it. `blocked` is the time in the call and in the wait before the update, with a forward and
backward of `--step` seconds in between; `durable` is from the call to the commit, with nothing beside it. The last
lines give what no way of deciding by content can avoid: one pass over the frozen bytes.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import torch
import typer
import xxhash
from rich.console import Console
from rich.table import Table

from spot_core.config import Settings
from spot_core.pytorch.fetch import memory
from spot_core.pytorch.session import Session
from spot_core.run import Run

ALONE, WHOLE, REFERRED = "trained part alone", "whole state, again and again", "frozen base referred to"
MB = 1_000_000


def tensors(nbytes: int, each: int) -> dict[str, torch.Tensor]:
    return {f"t{i}": torch.randn(each // 4) for i in range(max(1, nbytes // each))}


class Contestant:
    def __init__(self, name: str, folder: Path, frozen: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]):
        self.name, self.trained = name, trained
        self.frozen = {} if name == ALONE else frozen
        settings = Settings(sources="none", interval="1h", preflight=False, keep=2)
        self.session = Session(Run.open(folder), settings)
        self.session.resume()
        self.session.start()
        self.step = 0
        self.own = 0

    def save(self) -> float:
        """Seconds in the call."""
        self.step += 1
        for tensor in self.trained.values():
            tensor.add_(1)
        began = time.perf_counter()
        self.session.save(
            self.step,
            shared={"trained": self.trained, "frozen": self.frozen},
            local={},
            stable=[*self.trained.values(), *self.frozen.values()],
            frozen=list(self.frozen.values()) if self.name == REFERRED else (),
        )
        return time.perf_counter() - began

    def durable(self) -> float:
        began = time.perf_counter()
        self.save()
        self.session.wait_staged()
        committed = self.session.drain()
        assert committed is not None
        self.own = committed.manifest.own_size
        return time.perf_counter() - began

    def blocked(self, step_s: float) -> float:
        call = self.save()
        time.sleep(step_s)
        began = time.perf_counter()
        self.session.wait_staged()
        waited = time.perf_counter() - began
        self.session.drain()
        return call + waited


def passes(frozen: dict[str, torch.Tensor], turns: int) -> Iterator[tuple[str, float]]:
    views = [memory(tensor) for tensor in frozen.values()]
    for name, one in (("xxh3_128", xxhash.xxh3_128_digest), ("reading alone", lambda view: bytes(view[:1]))):
        taken = []
        for _ in range(turns):
            began = time.perf_counter()
            for view, tensor in zip(views, frozen.values(), strict=True):
                if name == "xxh3_128":
                    one(view)
                else:
                    tensor.view(torch.int32).sum()
            taken.append(time.perf_counter() - began)
        yield name, statistics.median(taken)


def main(
    frozen_mb: Annotated[int, typer.Option(help="MB that nothing trains.")] = 1000,
    trained_mb: Annotated[int, typer.Option(help="MB that change with every step, optimizer state included.")] = 10,
    turns: Annotated[int, typer.Option(help="Saves of each contestant that count.")] = 7,
    step: Annotated[float, typer.Option(help="Seconds of a forward and backward.")] = 0.3,
    folder: Annotated[Path | None, typer.Option(help="Where to write: on the disk to be measured.")] = None,
) -> None:
    torch.set_num_threads(1)
    frozen, trained = tensors(frozen_mb * MB, 4 * MB), tensors(trained_mb * MB, 100_000)
    place = Path(tempfile.mkdtemp(prefix="spot-frozen-", dir=folder))
    try:
        contestants = [
            Contestant(name, place / str(i), frozen, trained) for i, name in enumerate((ALONE, WHOLE, REFERRED))
        ]
        first = {one.name: (one.durable(), one.own) for one in contestants}
        for one in contestants:
            one.durable()
        durable: dict[str, list[float]] = {one.name: [] for one in contestants}
        blocked: dict[str, list[float]] = {one.name: [] for one in contestants}
        for _ in range(turns):
            for one in contestants:
                durable[one.name].append(one.durable())
                blocked[one.name].append(one.blocked(step))
        rows = Table("", "first: MB", "s", "later: MB", "x alone", "durable s", "x alone", "blocked s")
        base = contestants[0]
        for one in contestants:
            median, alone = statistics.median(durable[one.name]), statistics.median(durable[ALONE])
            rows.add_row(
                one.name,
                f"{first[one.name][1] / 1e6:.1f}",
                f"{first[one.name][0]:.2f}",
                f"{one.own / 1e6:.2f}",
                f"{one.own / base.own:.2f}",
                f"{median:.4f} ({min(durable[one.name]):.4f})",
                f"{median / alone:.2f}",
                f"{statistics.median(blocked[one.name]):.4f}",
            )
            one.session.close()
        console = Console(width=140)
        console.print(rows)
        for name, seconds in passes(frozen, turns):
            console.print(f"one pass over the frozen bytes, one thread, {name}: {seconds:.4f} s")
            with_pass = seconds + statistics.median(durable[ALONE])
            ratio = statistics.median(durable[REFERRED]) / with_pass
            console.print(f"  durable, against the trained part alone and this pass one after the other: x{ratio:.2f}")
    finally:
        shutil.rmtree(place, ignore_errors=True)


if __name__ == "__main__":
    typer.run(main)
