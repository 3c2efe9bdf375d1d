"""examples/hf_trainer as its README has it: killed, told to stop, and the same weights in the end."""

from __future__ import annotations

import sys
import time
from pathlib import Path

import pytest

from spot_core.run import Run

from ._processes import KILLED, ROOT, ended, popen

EXAMPLE = ROOT / "examples" / "hf_trainer" / "train.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_example_killed_and_continued(tmp_path: Path) -> None:
    def command(name: str) -> list[str]:
        options = {"output_dir": name, "run": f"{name}-run", "interval": "5 steps", "windows": "640"}
        given = {key: str(tmp_path / value) if "/" not in value and key in ("output_dir", "run") else value
                 for key, value in options.items()}
        words = [word for key, value in given.items() for word in (f"--{key}", value)]
        return [sys.executable, str(EXAMPLE), *words, "--use_cpu", "--report_to", "none", "--num_train_epochs", "2"]

    control = ended(popen(command("control")))
    assert control.returncode == 0, control.stdout[-3000:]
    for kill in (True, False):
        process = popen(command("job"))
        before = committed(tmp_path / "job-run")
        while process.poll() is None and committed(tmp_path / "job-run") < before + 2:
            time.sleep(0.02)
        process.kill() if kill else process.terminate()
        left = ended(process)
        assert left.returncode in (KILLED if kill else (143,)), left.stdout[-3000:]
    done = ended(popen(command("job")))
    assert done.returncode == 0, done.stdout[-3000:]
    names = [tmp_path / name / "model.safetensors" for name in ("control", "job")]
    assert names[0].read_bytes() == names[1].read_bytes()


def committed(run: Path) -> int:
    """How far the run has come: its newest step over all lives."""
    found = Run.open(run).discover().generations if run.exists() else ()
    return found[0].id.step if found else 0
