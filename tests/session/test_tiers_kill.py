"""Two tiers under SIGKILL at random instants: resumed from the local tier, without it, from a torn one, without one
machine's; the end is bit-equal to a run that was never killed."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from spot_core.layout import GenerationId
from spot_core.run import Run
from spot_core.verify import Depth

pytestmark = [pytest.mark.slow, pytest.mark.dist, pytest.mark.timeout(1200)]

ROOT = Path(__file__).parents[2]
STEPS = 300


class Job:
    def __init__(self, folder: Path, world: int) -> None:
        self.folder, self.world = folder, world
        folder.mkdir(parents=True)

    def live(self, kill_after: int | None) -> bool:
        """One life, killed after so many steps and a moment (None: not); whether it came to its end."""
        server = dist.TCPStore("127.0.0.1", 0, self.world, True, wait_for_workers=False, timeout=timedelta(seconds=60))
        for rank in range(self.world):
            (self.folder / f"begun{rank}").unlink(missing_ok=True)
            (self.folder / f"steps{rank}").unlink(missing_ok=True)
        ranks = [
            subprocess.Popen(
                [
                    *(sys.executable, "-m", "tests.session.tiers_train", str(self.folder)),
                    *map(str, (rank, self.world, server.port, STEPS)),
                ],
                cwd=ROOT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "TIERS_MB_S": "0.05"},
            )
            for rank in range(self.world)
        ]
        try:
            end = time.monotonic() + 120
            while not all((self.folder / f"begun{rank}").exists() for rank in range(self.world)):
                assert time.monotonic() < end
                assert all(process.poll() is None for process in ranks)
                time.sleep(0.01)
            if kill_after is not None:
                # Steps, not seconds: on a busy machine a second may hold none.
                steps = self.folder / "steps0"
                while kill_after and (steps.stat().st_size if steps.exists() else 0) < kill_after:
                    assert time.monotonic() < end
                    if any(process.poll() is not None for process in ranks):
                        break
                    time.sleep(0.002)
            else:
                assert [process.wait(120) for process in ranks] == [0] * self.world
        finally:
            ended = all(process.poll() == 0 for process in ranks)
            for process in ranks:
                process.send_signal(signal.SIGKILL)
                process.wait()
            del server
        return ended

    def resumed(self) -> list[str | None]:
        """What each life was resumed from; all ranks from the same."""
        said = [
            [json.loads(line)["from"] for line in (self.folder / f"said{rank}.jsonl").read_text().splitlines()]
            for rank in range(self.world)
        ]
        assert all(words == said[0] for words in said)
        return said[0]

    def newest(self, uri: Path | None = None) -> GenerationId | None:
        """The newest of the store, all of its generations verified to the last byte."""
        run = Run.open(str(uri or self.folder / "run"))
        found = run.discover().generations
        for committed in found:
            run.verify(committed, Depth.DIGESTS)
        return found[0].id if found else None

    def local(self, rank: int) -> Path:
        (folder,) = (self.folder / "local" / f"m{rank}").iterdir()
        return folder

    def finals(self) -> list[list[torch.Tensor]]:
        return [torch.load(self.folder / f"final{rank}.pt", weights_only=True) for rank in range(self.world)]


def tear_newest_blob(job: Job, rank: int) -> None:
    blobs = sorted(job.local(rank).glob(f"generations/*/*-r{rank:05d}.blob"))
    if blobs:
        with blobs[-1].open("r+b") as file:
            file.truncate(max(0, blobs[-1].stat().st_size - 100))


@pytest.mark.parametrize("world", [1, 2])
def test_killed_at_random_instants_with_the_local_tier_there_gone_or_torn(tmp_path: Path, world: int) -> None:
    seed = int(os.environ.get("TIERS_SEED", "7"))
    dice = random.Random(seed)
    print(f"TIERS_SEED={seed}")
    control = Job(tmp_path / "control", world)
    assert control.live(None)
    job = Job(tmp_path / "job", world)
    only_local = without = 0
    before: Any = None
    for number in range(8):
        if job.live(dice.randint(7, 40)):
            break
        durable = job.newest()
        tampered = ("", "gone", "torn", "one machine")[number % 4]
        victim = dice.randrange(world)
        if tampered == "gone":
            shutil.rmtree(job.folder / "local")
        elif tampered == "torn":
            tear_newest_blob(job, victim)
        elif tampered == "one machine":
            shutil.rmtree(job.folder / "local" / f"m{victim}")
        before = (tampered, durable)
        assert not job.live(0)  # comes up and is killed again, having said from where
        name = job.resumed()[-1]
        came = None if name is None else GenerationId.parse(name)
        if tampered in ("gone", "one machine"):
            assert came == durable, f"{before}: all that is left is what the store has"
            without += 1
        elif durable is not None:
            assert came is not None
            assert came >= durable
        only_local += came is not None and (durable is None or came > durable)
    assert without >= 2
    assert only_local >= 2, "no life was resumed from what only the local tier had"
    assert job.live(None)
    for mine, theirs in zip(job.finals(), control.finals(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))
    assert job.newest() == Run.open(str(job.folder / "run")).discover().generations[0].id
    assert Run.open(str(job.folder / "run")).discover().generations[0].manifest.finished
