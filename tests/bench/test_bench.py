"""The benchmark still runs: a small state, one save; what it measured is not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.bench.stores import RESTORES, UPLOADS

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_the_benchmark_gives_table_goals_and_numbers(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    options = ["--size", "10M", "--saves", "1", "--turns", "1", "--steps", "1", "--folder", str(tmp_path)]
    parts = ["--part", "saves", "--part", "memory", "--part", "restore"]
    only = ["--only", "spot", "--only", "dcp.async_save cached"]
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", *options, *parts, *only, "--json", str(numbers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "Goals" in done.stdout
    measured = json.loads(numbers.read_text())
    for name in ("spot", "dcp.async_save cached"):
        entry = measured["saves"]["10M"][name]
        assert len(entry["saves"]) == len(entry["firsts"]) == 1
        assert 0 < entry["saves"][0]["blocked"] <= entry["saves"][0]["durable"] + entry["saves"][0]["step"]
        assert measured["memory"][name] > 0
    assert measured["restore"]["10M"]["restore"]["spot"]["cold"]
    assert not list(tmp_path.glob("spot-bench-*"))


@pytest.mark.slow
def test_the_benchmark_of_stores_gives_numbers_of_every_contestant(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.stores", "--mb", "70", "--json", str(numbers)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(numbers.read_text())
    names = {kind: {row["name"] for row in rows if row["kind"] == kind} for kind in ("upload", "restore")}
    assert names == {"upload": set(UPLOADS), "restore": set(RESTORES)}
    assert all(min(row["MB/s"]) > 0 for row in rows)
    for row in rows:
        if row["kind"] == "restore" and not row["name"].startswith("dcp"):
            assert 1.0 <= row["downloaded"] / (70e6 / row["parts"]) < 1.3, row
