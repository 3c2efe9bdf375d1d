"""The example, by its own YAML's shape: killed twice, and told to stop once, it ends with the same adapters."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
import yaml

from .test_launcher import TREE

EXAMPLE = TREE / "examples" / "accelerate_finetune"
OPTIONS = ("--windows", "192", "--num_epochs", "2", "--gradient_accumulation_steps", "2")


def command(folder: Path, out: str, run: str) -> list[str]:
    content = yaml.safe_load((EXAMPLE / "spot.yaml").read_text())
    content["spot_config"] |= {"run": str(folder / run), "interval": "2 steps", "sources": "sigterm"}
    file = folder / f"{run}.yaml"
    file.write_text(yaml.safe_dump(content))
    line = [sys.executable, "-m", "accelerate_spot.cli", "launch", "--config_file", str(file)]
    return [*line, str(EXAMPLE / "train.py"), "--out", str(folder / out), *OPTIONS]


def rows(folder: Path) -> list[dict[str, object]]:
    file = folder / "losses-rank0.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_killed_and_told_to_stop(tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPOT_", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    subprocess.run(command(tmp_path, "control", "control-run"), env=environ, check=True, timeout=200)
    line, out = command(tmp_path, "out", "run"), tmp_path / "out"
    for rows_then, how in ((6, signal.SIGKILL), (14, signal.SIGTERM), (19, signal.SIGKILL)):
        process = subprocess.Popen(line, env=environ)
        while process.poll() is None and len(rows(out)) < rows_then:
            threading.Event().wait(0.02)
        process.send_signal(how)
        assert process.wait(100) == (143 if how == signal.SIGTERM else -9)
    subprocess.run(line, env=environ, check=True, timeout=200)
    want = rows(tmp_path / "control")
    assert len(want) == 24
    assert all(row in want for row in rows(out)), "the same samples and losses, whatever was done twice"
    assert [row for row in want if row not in rows(out)] == []
    got, expected = (torch.load(folder / "adapters.pt", weights_only=True) for folder in (out, tmp_path / "control"))
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], value) for name, value in expected.items())
