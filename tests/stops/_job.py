"""Starts the training job in one of its shapes, aims signals at parts of it, and compares it with its control."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import psutil
import torch

from spot_core.run import Run
from spot_core.verify import Depth

TRAIN = Path(__file__).with_name("train.py")
SPOT = [sys.executable, "-m", "spot_core.cli", "launch"]
PATIENCE_S = 200.0
RANKS = {"one": 1, "lightning": 2, "torchrun": 2, "launch": 2, "agents": 2}
"""Shapes of the job: a plain process, Lightning's own launcher, torchrun, `spot launch`, two `spot launch` as two nodes
would run them."""


def commands(shape: str, folder: Path) -> list[list[str]]:
    """One command line per launcher of the job."""
    script = [str(TRAIN), str(folder)]
    if shape in ("one", "lightning"):
        return [[sys.executable, *script]]
    if shape == "torchrun":
        return [[sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", *script]]
    if shape == "launch":
        return [[*SPOT, "--nproc-per-node", "2", "--", *script]]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        where = f"localhost:{probe.getsockname()[1]}"
    meeting = ["--nnodes", "2", "--rdzv-backend", "c10d", "--rdzv-id", "stops", "--rdzv-endpoint", where]
    return [[*SPOT, *meeting, "--nproc-per-node", "1", "--", *script]] * 2


class Start:
    """One start of the job in `folder`; at the end of the `with` block nothing of it is left.

    settings: SPOT_* and STOPS_* variables.
    """

    def __init__(self, shape: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder, self.ranks = folder, RANKS[shape]
        number = len(list(folder.glob("start*.log")))
        folder.mkdir(parents=True, exist_ok=True)
        self._seen = {rank: len(evidence(folder, rank)) for rank in range(self.ranks)}
        dropped = ("SPOT_", "STOPS_", "PET_", "TORCHELASTIC_", "SLURM_", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_")
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith(dropped)},
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
            "STOPS_DEVICES": str(self.ranks),
            "SPOT_RUN": str(folder / "run"),
            "SPOT_INTERVAL": "1000 steps",  # what is saved is saved because of the notice
            "SPOT_SOURCES": "signals",
            "SPOT_KEEP": "1000",
            **settings,
        }
        self._tree: dict[int, psutil.Process] = {}
        self.logs = [folder / f"start{number}-{index}.log" for index in range(len(commands(shape, folder)))]
        self.launchers: list[subprocess.Popen[bytes]] = []
        for command, log in zip(commands(shape, folder), self.logs, strict=True):
            with log.open("wb") as file:
                self.launchers.append(subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, env=environment))

    def __enter__(self) -> Start:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._grow()
        for process in [*self._tree.values(), *map(_handle, self.launchers)]:
            if process is not None and process.is_running():
                try:
                    process.kill()
                except psutil.NoSuchProcess:
                    continue
        for launcher in self.launchers:
            launcher.wait()
        if error is not None:
            print(self.output())  # shown by pytest

    def _grow(self) -> None:
        """Remember every process of the job while its parent is there to be asked."""
        for launcher in filter(None, map(_handle, self.launchers)):
            try:
                self._tree.update((child.pid, child) for child in launcher.children(recursive=True))
            except psutil.NoSuchProcess:
                continue

    def wait_for(self, what: Callable[[], Any], why: str) -> Any:
        until = time.monotonic() + PATIENCE_S
        while not (found := what()):
            assert any(launcher.poll() is None for launcher in self.launchers), f"the job ended before: {why}"
            assert time.monotonic() < until, f"never happened: {why}"
            time.sleep(0.02)
        self._grow()
        return found

    # -- what the ranks say --------------------------------------------------------------------------------------------

    def rows(self, rank: int) -> list[dict[str, Any]]:
        """This start's own evidence."""
        return evidence(self.folder, rank)[self._seen[rank] :]

    def batches(self, rank: int) -> list[int]:
        return [row["batch"] for row in self.rows(rank) if "batch" in row]

    def wait_training(self, batches: int = 3) -> None:
        """Every rank has trained on so many batches in this start."""
        self.wait_for(
            lambda: all(len(self.batches(rank)) >= batches for rank in range(self.ranks)), f"{batches} batches"
        )

    def wait_validation(self) -> None:
        self.wait_for(
            lambda: all(any("validation" in row for row in self.rows(rank)) for rank in range(self.ranks)),
            "validation on every rank",
        )

    def exits(self) -> list[int | None]:
        """By rank the code that its script left with; None for one that did not."""
        return [next((row["exit"] for row in self.rows(rank) if "exit" in row), None) for rank in range(self.ranks)]

    def output(self) -> str:
        return "".join(log.read_text(errors="replace") for log in self.logs)

    def wait_output(self, text: str) -> None:
        self.wait_for(lambda: text in self.output(), f"{text!r} in the log")

    # -- aiming --------------------------------------------------------------------------------------------------------

    def rank(self, number: int) -> psutil.Process:
        pid = next(row["pid"] for row in self.rows(number) if "pid" in row)
        return self._tree.get(pid) or psutil.Process(pid)

    def writers(self) -> list[psutil.Process]:
        """The helper processes that write the snapshots."""
        return [
            child
            for rank in range(self.ranks)
            for child in self.rank(rank).children()
            if "spot_core.writer" in " ".join(child.cmdline())
        ]

    def tell(self, target: int | str, signum: int = signal.SIGTERM) -> None:
        """Signal a rank by its number, or a launcher: "agent", "agent 1". One that has gone already misses it."""
        if isinstance(target, int):
            try:
                self.rank(target).send_signal(signum)
            except psutil.NoSuchProcess:
                return
        else:
            self.launchers[int(target.partition(" ")[2] or 0)].send_signal(signum)

    def finish(self) -> list[int]:
        """The launchers' exit codes, once they end by themselves; everything they started has to be gone with them."""
        codes = []
        for launcher in self.launchers:
            until = time.monotonic() + PATIENCE_S
            while launcher.poll() is None:
                assert time.monotonic() < until, "the job never ended"
                self._grow()
                time.sleep(0.05)
            codes.append(launcher.returncode)
        _, left = psutil.wait_procs(self._tree.values(), timeout=20)
        assert left == [], "processes left behind"
        return codes


def _handle(launcher: subprocess.Popen[bytes]) -> psutil.Process | None:
    if launcher.poll() is not None:
        return None
    try:
        return psutil.Process(launcher.pid)
    except psutil.NoSuchProcess:
        return None


def evidence(folder: Path, rank: int) -> list[dict[str, Any]]:
    """Every whole line of a rank, over all starts."""
    path = folder / f"rank{rank}.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def trained(folder: Path, rank: int) -> dict[int, dict[str, Any]]:
    """Sample ids and loss by batch; a batch that was trained on twice was the same both times."""
    rows: dict[int, dict[str, Any]] = {}
    for row in evidence(folder, rank):
        if "batch" in row:
            assert rows.setdefault(row["batch"], row) == row
    return rows


def assert_same(folder: Path, control: Path, ranks: int) -> None:
    """Ids, losses, final weights and optimizer state, bit for bit."""
    for rank in range(ranks):
        assert trained(folder, rank) == trained(control, rank)
        ours, theirs = (torch.load(at / f"final-rank{rank}.pt", weights_only=True) for at in (folder, control))
        assert _flat(ours) == _flat(theirs)


def _flat(value: Any, where: str = "") -> dict[str, Any]:
    if isinstance(value, torch.Tensor):
        return {where: (value.dtype, value.contiguous().numpy().tobytes())}
    if isinstance(value, Mapping):
        return {k: v for key, item in value.items() for k, v in _flat(item, f"{where}.{key}").items()}
    if isinstance(value, (list, tuple)):
        return {k: v for i, item in enumerate(value) for k, v in _flat(item, f"{where}.{i}").items()}
    return {where: value}


def committed_steps(folder: Path) -> list[int]:
    """Steps of the generations, newest first; every byte of each is as it was committed. Cut-off saves do not count."""
    run = Run.open(folder / "run")
    found = run.discover()
    assert [problem for problem in found.problems if problem.error is not None] == []
    for committed in found.generations:
        run.verify(committed, Depth.DIGESTS)
    return [committed.id.step for committed in found.generations]
