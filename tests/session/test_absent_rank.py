"""A rank that never comes to a save: the others end in an error that names it, and do not wait for ever."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


def test_the_others_name_it(tmp_path: Path) -> None:
    workers = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.session.absent", str(rank), "3", str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(3)
    ]
    try:
        outputs = [worker.communicate(timeout=90)[0] for worker in workers[:2]]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    named = "missing_ranks: Nothing was saved at step 1: rank 2 did not come to the save within 2 s"
    assert all(named in output for output in outputs), outputs
