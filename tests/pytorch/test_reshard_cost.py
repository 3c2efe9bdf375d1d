"""What a load into another sharding costs: each rank reads what it needs, and holds little more than its shard."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from spot_core.config import Settings
from spot_core.digest import CHUNK_SIZE
from spot_core.pytorch.session import Session
from spot_core.run import Run

from .reshard_rank import ROWS, SMALL_ROWS, WORLD, tensor

ROOT = Path(__file__).parents[2]


def saved(folder: Path, tensors: int, rows: int) -> str:
    run = Run.open(folder)
    with Session(run, Settings(sources="none", writer="thread", preflight=False)) as session:
        session.resume()
        session.start()
        session.save(1, shared={"model": {f"w{i}": tensor(i, rows) for i in range(tensors)}}, local={}, wait=True)
    return run.uri


@pytest.mark.slow
@pytest.mark.parametrize("tensors", [6, 12])
def test_four_ranks_load_what_one_saved(tensors: int, tmp_path: Path) -> None:
    """Rows of each tensor, 98 or 197 MB a rank. Chunks are checked whole: a shard begins and ends in chunks that it
    needs in part, and as many as there are threads are in memory at a time.

    A process's first load takes some 30 MB of libraries and the like as well, once, whatever the shard.
    """
    uri, small = saved(tmp_path / "run", tensors, ROWS), saved(tmp_path / "small", 1, SMALL_ROWS)
    for rank in range(WORLD):
        command = [sys.executable, "-m", "tests.pytorch.reshard_rank", str(rank), uri, small, str(tensors)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["right"]
        assert said["shard"] == tensors * tensor(0).nbytes // WORLD
        assert said["shard"] <= said["read"] <= said["shard"] + 2 * tensors * CHUNK_SIZE
        assert said["peak"] < 1.5 * said["shard"], said
        assert said["peak"] < said["shard"] + 45_000_000, said
        assert said["once"] < 60_000_000, said
