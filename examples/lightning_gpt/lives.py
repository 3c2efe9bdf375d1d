"""Starts the training job as a user would, and kills the whole of it at once."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import yaml

HERE = Path(__file__).resolve().parent
_MARK = "BYTE_GPT_LIFE"
_RESUMED = re.compile(r"resumed from step (\d+)")


@dataclass(frozen=True)
class Job:
    """The training job in ``folder``: one command line, the same for every life."""

    folder: Path
    ranks: int = 1
    workers: int = 0
    accumulate: int = 1
    epochs: int = 3
    windows: int = 3200
    interval: int = 25  # optimizer steps
    keep: int = 3
    callback: Mapping[str, Any] = field(default_factory=dict)  # more arguments of SpotCallback
    bucket: str = ""  # such as s3://bucket/prefix: the runs go there, opened by what the environment says

    @property
    def run(self) -> str:
        """The run's folder or URI."""
        return f"{self.bucket}/{self.folder.name}/gpt" if self.bucket else str(self.folder / "runs" / "gpt")

    @property
    def evidence(self) -> Path:
        return self.folder / "evidence"

    @property
    def curves(self) -> Path:
        return self.folder / "curves"

    def prepare(self) -> None:
        """Writes the job's configuration, made from the example's own."""
        config = yaml.safe_load((HERE / "config.yaml").read_text(encoding="utf-8"))
        config["data"].update(num_workers=self.workers, windows=self.windows)
        trainer = config["trainer"]
        trainer.update(max_epochs=self.epochs, accumulate_grad_batches=self.accumulate, devices=self.ranks)
        trainer.update(strategy="ddp" if self.ranks > 1 else "auto")
        for callback in trainer["callbacks"]:
            if callback["class_path"].endswith("SpotCallback"):
                callback["init_args"].update(run=self.run, interval=f"{self.interval} steps", keep=self.keep)
                callback["init_args"].update(self.callback)
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "config.yaml").write_text(yaml.safe_dump(config, sort_keys=False), encoding="utf-8")

    @property
    def command(self) -> list[str]:
        script = [str(HERE / "train.py"), "fit", "--config", "config.yaml"]
        if self.ranks == 1:
            return [sys.executable, *script]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        return [*torchrun, *script]


class Life:
    """One start of the job. Its output goes to ``life-<n>.log`` in the job's folder."""

    def __init__(self, job: Job) -> None:
        number = len(list(job.folder.glob("life-*.log")))
        self.log = job.folder / f"life-{number:03d}.log"
        self._mark = secrets.token_hex(8)
        environment = {**os.environ, _MARK: self._mark, "PYTHONUNBUFFERED": "1"}
        # One thread: sums come out in one order, and two ranks do not fight for two cores.
        environment.setdefault("OMP_NUM_THREADS", "1")
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(
                job.command,
                cwd=job.folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def running(self) -> bool:
        return self.process.poll() is None

    def wait(self, timeout_s: float) -> int:
        """Exit code; a life that takes longer is killed and TimeoutExpired is raised."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise

    def kill(self) -> None:
        """SIGKILL to every process of this life: ranks, agent, data workers, writers. Returns when all are gone.

        The process tree first, as fast as it goes; then whoever carries the life's mark in its environment (a child
        whose parent is dead is in no tree any more).
        """
        with contextlib.suppress(psutil.NoSuchProcess):
            family = psutil.Process(self.process.pid).children(recursive=True)
            _kill([*family, psutil.Process(self.process.pid)])
        while members := list(self._members()):
            _kill(members)
            psutil.wait_procs(members, timeout=5)
        self.process.wait()

    def _members(self) -> Iterator[psutil.Process]:
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                if process.environ().get(_MARK) == self._mark and process.status() != psutil.STATUS_ZOMBIE:
                    yield process

    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    def resumed_step(self) -> int:
        """The step that this life says it went on from; 0 for a fresh start."""
        found = _RESUMED.findall(self.output())
        return int(found[-1]) if found else 0


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
