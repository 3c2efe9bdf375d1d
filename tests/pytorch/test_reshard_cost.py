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

from .reshard_rank import TENSORS, WORLD, tensor

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_four_ranks_load_what_one_saved(tmp_path: Path) -> None:
    """Rows of each tensor. Chunks are checked whole: a shard begins and ends in chunks that it needs in part.

    Beside the shard a load takes some 30 MB of libraries, whatever the shard, and chunks that are needed in part.
    """
    run = Run.open(tmp_path / "run")
    with Session(run, Settings(sources="none", writer="thread", preflight=False)) as session:
        session.resume()
        session.start()
        session.save(1, shared={"model": {f"w{i}": tensor(i) for i in range(TENSORS)}}, local={}, wait=True)
    for rank in range(WORLD):
        command = [sys.executable, "-m", "tests.pytorch.reshard_rank", str(rank), run.uri]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["right"]
        assert said["shard"] == TENSORS * tensor(0).nbytes // WORLD
        assert said["shard"] <= said["read"] <= said["shard"] + 2 * TENSORS * CHUNK_SIZE
        assert said["peak"] < 1.5 * said["shard"], said
        assert said["peak"] < said["shard"] + 80_000_000, said
