"""The benchmark still runs: a small state, one save; what it measured is not judged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from spot_core.digest import CHUNK_SIZE
from tests.bench.stores import RESTORES, UPLOADS

ROOT = Path(__file__).resolve().parents[2]


def numbers(folder: Path, module: str, *options: str) -> tuple[Any, str]:
    """What the benchmark wrote, and what it said."""
    written = folder / "numbers.json"
    done = subprocess.run(
        [sys.executable, "-m", module, *options, "--json", str(written)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(written.read_text()), done.stdout


@pytest.mark.slow
def test_the_benchmark_gives_table_goals_and_numbers(tmp_path: Path) -> None:
    options = ["--size", "10M", "--saves", "1", "--turns", "1", "--steps", "1", "--folder", str(tmp_path)]
    parts = ["--part", "saves", "--part", "memory", "--part", "restore"]
    only = ["--only", "spot", "--only", "dcp.async_save cached"]
    measured, said = numbers(tmp_path, "tests.bench", *options, *parts, *only)
    assert "Goals" in said
    for name in ("spot", "dcp.async_save cached"):
        entry = measured["saves"]["10M"][name]
        assert len(entry["saves"]) == len(entry["firsts"]) == 1
        assert 0 < entry["saves"][0]["blocked"] <= entry["saves"][0]["durable"] + entry["saves"][0]["step"]
        assert measured["memory"][name] > 0
    assert measured["restore"]["10M"]["restore"]["spot"]["cold"]
    assert not list(tmp_path.glob("spot-bench-*"))


@pytest.mark.slow
def test_the_benchmark_of_stores_gives_numbers_of_every_contestant(tmp_path: Path) -> None:
    rows, _ = numbers(tmp_path, "tests.bench.stores", "--mb", "70")
    names = {kind: {row["name"] for row in rows if row["kind"] == kind} for kind in ("upload", "restore")}
    assert names == {"upload": set(UPLOADS), "restore": set(RESTORES)}
    assert all(min(row["MB/s"]) > 0 for row in rows)
    for row in rows:
        if row["kind"] == "restore" and not row["name"].startswith("dcp"):
            needed = 70e6 / row["parts"]
            assert needed <= row["downloaded"] <= needed + 2 * CHUNK_SIZE, row  # whole chunks, to check their digests
