"""`--nnodes=1:2`: an agent is lost, and another one comes; the training goes on with what there is."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from .test_resize import SCRIPT, assert_close, lives

pytestmark = [pytest.mark.dist, pytest.mark.slow, pytest.mark.timeout(900)]

PATIENCE_S = 240.0


LAUNCHERS = {"torchrun": "torch.distributed.run", "spot launch": "spot_core.cli launch"}


class Agents:
    """A launcher's agents of one job, each as on a node of its own; the first one is the meeting point."""

    def __init__(self, launcher: str, folder: Path, *args: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            where = f"127.0.0.1:{probe.getsockname()[1]}"
        self._folder, self._running = folder, list[subprocess.Popen[bytes]]()
        self._command = [
            *(sys.executable, "-m", *LAUNCHERS[launcher].split()),
            *("--nnodes=1:2", "--nproc-per-node=1", "--max-restarts=3"),
            *("--rdzv-backend=c10d", "--rdzv-id=elastic", f"--rdzv-endpoint={where}", "--monitor-interval=0.2"),
            "--local-addr=127.0.0.1",
        ]
        self._script = [
            *(str(SCRIPT), "--folder", str(folder / "run"), "--out", str(folder / "o"), *args),
        ]
        self._env = {k: v for k, v in os.environ.items() if not k.startswith(("SPOT_", "TORCHELASTIC_", "PET_"))}
        self._env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        if launcher == "torchrun":  # `spot launch` sees to it
            self._env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"

    def begin(self) -> subprocess.Popen[bytes]:
        log = (self._folder / f"agent-{len(self._running)}.log").open("ab")
        meeting = f"--rdzv-conf=last_call_timeout=5,keep_alive_interval=1,is_host={int(not self._running)}"
        agent = subprocess.Popen([*self._command, meeting, *self._script], stdout=log, stderr=log, env=self._env)
        self._running.append(agent)
        return agent

    def lose(self, agent: subprocess.Popen[bytes]) -> None:
        """Its machine goes: the agent and its workers, with no word to anybody."""
        for process in [*psutil.Process(agent.pid).children(recursive=True), agent]:
            try:
                os.kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        agent.wait()

    def said(self) -> str:
        return "\n".join(path.read_text()[-4000:] for path in sorted(self._folder.glob("agent-*.log")))

    def wait_until(self, what: Callable[[], bool]) -> None:
        until = time.monotonic() + PATIENCE_S
        while not what():
            dead = [agent for agent in self._running if agent.returncode is None and agent.poll() is not None]
            assert not dead, self.said()
            assert time.monotonic() < until, self.said()
            time.sleep(0.1)

    def close(self) -> None:
        for agent in self._running:
            if agent.poll() is None:
                self.lose(agent)


@contextmanager
def agents(launcher: str, folder: Path, *args: str) -> Iterator[Agents]:
    made = Agents(launcher, folder, *args)
    try:
        yield made
    finally:
        made.close()


def rows(out: Path) -> list[tuple[Path, dict[str, Any]]]:
    """What was trained on, in the order of the starts."""
    found = []
    for path in sorted(out.glob("*.jsonl"), key=lambda path: int(path.stem.partition("-")[0])):
        for line in path.read_text().splitlines(keepends=True):
            if line.endswith("\n") and "loss" in (row := json.loads(line)):
                found.append((path, row))
    return found


def counted(out: Path) -> dict[int, tuple[list[int], float, int]]:
    """Samples, learning rate and ranks of each step, as the last life that took it did."""
    found: dict[int, tuple[list[int], float, int]] = {}
    everything = rows(out)
    for step in {row["step"] for _, row in everything}:
        mine = [(path, row) for path, row in everything if row["step"] == step]
        ranks = mine[-1][1]["ranks"]
        last = {path.stem.partition("rank")[2]: path for path, row in mine if row["ranks"] == ranks}
        assert sorted(last) == [str(rank) for rank in range(ranks)]
        kept = [row for path, row in mine if path in last.values()]
        assert len({row["lr"] for row in kept}) == 1
        found[step] = (sorted(i for row in kept for i in row["ids"]), kept[0]["lr"], ranks)
    return found


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_an_agent_is_lost_and_another_one_comes(launcher: str, tmp_path: Path) -> None:
    control = lives(tmp_path / "control", tmp_path / "c", [2], [])
    out = tmp_path / "o"

    def trained(ranks: int, steps: int) -> Callable[[], bool]:
        return lambda: len({row["step"] for _, row in rows(out) if row["ranks"] == ranks}) >= steps

    args = ("--every", "2 steps", "--pace", "0.4")
    with agents(launcher, tmp_path, *args) as job:
        first, second = job.begin(), job.begin()
        job.wait_until(trained(2, 4))
        job.lose(second)
        job.wait_until(trained(1, 3))
        third = job.begin()
        codes = first.wait(PATIENCE_S), third.wait(PATIENCE_S)
        said = job.said()
    if launcher == "spot launch":  # the group that stops for the new agent asks its orchestrator to start all again
        assert codes[0] == 143, said
        assert "Stopped cleanly at step" in said
        assert codes[1] != 0, said
        with agents(launcher, tmp_path, *args) as job:
            again = job.begin(), job.begin()
            codes = again[0].wait(PATIENCE_S), again[1].wait(PATIENCE_S)
            said = job.said()
    assert codes == (0, 0), said
    got = counted(out)
    assert {step: ids for step, (ids, _, _) in got.items()} == control.ids
    assert {step: rate for step, (_, rate, _) in got.items()} == control.lr
    worlds = [got[step][2] for step in sorted(got)]
    assert (worlds[0], worlds[-1]) == (2, 2)
    assert 1 in worlds
    assert_close(out, tmp_path / "c")
