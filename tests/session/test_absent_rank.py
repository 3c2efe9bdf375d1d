"""A rank that does not come to a save, or out of a load: the others end in an error that names it, in bounded time."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from spot_core.config import Settings
from spot_core.pytorch.session import Session
from spot_core.run import Run

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("what", "absent", "named"),
    [
        ("save", 2, "missing_ranks: Nothing was saved at step 1: rank 2 did not come to the save within 2 s"),
        ("save and life", 2, "missing_ranks: Nothing was saved at step 1: rank 2 has given no sign of life for"),
        ("load", 2, "RestoreError missing_ranks: Nothing was loaded: rank 2 did not come to the load within 2 s"),
        pytest.param(
            "load",
            0,
            "RestoreError missing_ranks: Nothing was loaded: rank 0 did not come to the load within 2 s",
            marks=pytest.mark.slow,
        ),
        ("stopped", 2, "RestoreError missing_ranks: Nothing was loaded: rank 2 has given no sign of life for"),
        pytest.param(  # whose process hosts the store here
            "stopped",
            0,
            "Nothing was loaded: the store shared by the ranks, which rank 0 or a launcher hosts, does not answer",
            marks=pytest.mark.slow,
        ),
        ("reading", 2, "RestoreError missing_ranks: Nothing was loaded: rank 2 has got no further for"),
        pytest.param("reading", 0, "Nothing was loaded: rank 0 has got no further for", marks=pytest.mark.slow),
    ],
    ids=[
        "a save",
        "a save that it does not live to see",
        "a load",
        "a load that rank 0 misses",
        "stopped inside of the load",
        "rank 0 stopped inside of the load",
        "reading without an end",
        "rank 0 reading without an end",
    ],
)
def test_the_others_name_it(what: str, absent: int, named: str, tmp_path: Path) -> None:
    with Session(Run.open(tmp_path / "run"), Settings(sources="none", writer="thread", preflight=False)) as session:
        session.start()
        session.save(0, shared={"w": torch.zeros(3)}, local={}, wait=True)
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.session.absent", str(rank), "3", str(tmp_path), what, str(absent)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [worker.communicate(timeout=150)[0] for rank, worker in enumerate(workers) if rank != absent]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert all(named in output for output in outputs), outputs
