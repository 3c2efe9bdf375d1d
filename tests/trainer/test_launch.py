"""A Trainer script without a line about it, under `accelerate-spot launch` with a YAML (L3, N3, N5)."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import yaml

from ._processes import SCRIPT, assert_same, ended, newest, popen

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def command(folder: Path, processes: int) -> list[str]:
    """The launcher with a script that has no callback; its run is in `folder`/run."""
    folder.mkdir(exist_ok=True)
    content = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "MULTI_GPU" if processes > 1 else "NO",
        "num_processes": processes,
        "use_cpu": True,
        "main_process_port": 0,
        "spot_config": {"run": str(folder / "run"), "interval": "3 steps", "sources": "sigterm"},
    }
    file = folder / "cfg.yaml"
    file.write_text(yaml.safe_dump(content))
    launch = [sys.executable, "-m", "accelerate_spot.cli", "launch", "--config_file", str(file)]
    return [*launch, str(SCRIPT), "--out", str(folder / "out")]


@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.dist)])
def test_killed_and_told_to_stop(tmp_path: Path, processes: int) -> None:
    control, job = tmp_path / "control", tmp_path / "job"
    done = ended(popen(command(control, processes)))
    assert done.returncode == 0, done.stdout[-3000:]
    killed = ended(popen([*command(job, processes), "--kill", "8", "--ranks", str(processes - 1)]))
    assert killed.returncode not in (0, 143), killed.stdout[-3000:]
    assert newest(job) in (3, 6)
    told = ended(popen([*command(job, processes), "--term", "11", "--ranks", "0", "--pause", "0.05"]))
    assert told.returncode == 143, told.stdout[-3000:]
    assert newest(job) >= 11
    assert not list((job / "out").glob("final*"))
    done = ended(popen(command(job, processes)))
    assert done.returncode == 0, done.stdout[-3000:]
    assert_same(job, control, ranks=processes)
