"""The unchanged script of the examples: killed and started again, it ends as plain `python` lets it end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import yaml
from accelerate.commands.config.config_args import load_config_from_file
from safetensors.torch import load_file

from accelerate_spot.launch import configuration
from accelerate_spot.section import Section

from .test_launcher import TREE

EXAMPLE = TREE / "examples" / "accelerate_unchanged"
OPTIONS = ("--train_size", "384", "--num_epochs", "3", "--gradient_accumulation_steps", "2", "--num_workers", "1")
STEPS = 3 * 384 // 16


def test_neither_knows_of_the_other(tmp_path: Path) -> None:
    """The script has no word of the run, and without its section the file is accelerate's own."""
    assert "spot" not in (EXAMPLE / "train.py").read_text().lower()
    rest, section = configuration.read(EXAMPLE / "config.yaml")
    assert Section.active(environ={}, **section).run == "runs/classify"
    with pytest.raises(ValueError, match=r"unknown keys \(\['spot_config'\]\)"):
        load_config_from_file(str(EXAMPLE / "config.yaml"))
    with configuration.for_accelerate("config.yaml", rest) as file:
        assert load_config_from_file(file).use_cpu is True


def rows(folder: Path) -> list[dict[str, object]]:
    file = folder / "log-0.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.slow
def test_killed_it_ends_as_without(tmp_path: Path) -> None:
    """In epoch 0 and in a later one, with the same command each time; the control is no run of ours at all."""
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("SPOT_", "ACCELERATE_"))}
    environ |= {"PYTHONPATH": str(TREE), "OMP_NUM_THREADS": "1"}
    script = [str(EXAMPLE / "train.py"), *OPTIONS, "--output_dir"]
    subprocess.run([sys.executable, *script, str(tmp_path / "control"), "--cpu"], env=environ, check=True, timeout=200)

    content = yaml.safe_load((EXAMPLE / "config.yaml").read_text())
    content["spot_config"] |= {"run": str(tmp_path / "run"), "interval": "2 steps", "sources": "sigterm"}
    config, out = tmp_path / "config.yaml", tmp_path / "out"
    config.write_text(yaml.safe_dump(content))
    line = [sys.executable, "-m", "accelerate_spot.cli", "launch", "--config_file", str(config), *script, str(out)]
    for rows_then in (STEPS // 6, STEPS // 2):
        process = subprocess.Popen(line, env=environ)
        while process.poll() is None and len(rows(out)) < rows_then:
            threading.Event().wait(0.02)
        process.kill()
        assert process.wait(100) == -9
    done = subprocess.run(line, env=environ, check=True, timeout=200, capture_output=True, text=True)
    assert "the epoch loop in line" in done.stderr
    assert "resumed from step" in done.stderr

    want = rows(tmp_path / "control")
    assert len(want) == STEPS
    assert all(row in want for row in rows(out)), "the same samples and losses, whatever was done twice"
    assert [row for row in want if row not in rows(out)] == []
    got, expected = (load_file(folder / "model" / "model.safetensors") for folder in (out, tmp_path / "control"))
    assert got.keys() == expected.keys()
    assert all(got[name].equal(value) for name, value in expected.items())
