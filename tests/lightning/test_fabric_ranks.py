"""A Fabric loop on two ranks of torchrun: killed, told to stop, resumed by as many and by others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from ._harness import SAMPLES, assert_equal

HERE = Path(__file__).resolve()
pytestmark = [pytest.mark.dist, pytest.mark.slow]


def start(run: Path, out: Path, number: int, strategy: str, *args: str, ranks: int = 2) -> tuple[int, str]:
    """Exit code of torchrun and what was printed."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPOT_")}
    path = os.pathsep.join(filter(None, (str(HERE.parents[2]), env.get("PYTHONPATH"))))
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    done = subprocess.run(
        [*command, str(HERE.with_name("_fabric_script.py")), str(run), str(out), str(number), strategy, *args],
        env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, timeout=280,
    )
    return done.returncode, done.stdout


def rows(out: Path) -> dict[tuple[int, int], dict[str, Any]]:
    """What was done, by rank and step; a step that was repeated counts as the later start did it."""
    found = {}
    for path in sorted(out.glob("*.jsonl")):
        rank = int(path.stem.rpartition("rank")[2])
        for row in map(json.loads, path.read_text().splitlines()):
            found[rank, row["step"]] = row
    return found


def assert_same(out: Path, control: Path, ranks: int) -> None:
    assert rows(out) == rows(control)
    for rank in range(ranks):
        got, want = (torch.load(folder / f"final-rank{rank}.pt", weights_only=True) for folder in (out, control))
        assert_equal(got, want, f"rank {rank}")


@pytest.mark.parametrize(
    ("strategy", "ranks"), [("ddp", 2), ("fsdp1", 2), ("fsdp2", 2), ("tp", 2), ("2d", 4)], ids=lambda value: str(value)
)
def test_killed_and_told_to_stop_and_the_same(strategy: str, ranks: int, tmp_path: Path) -> None:
    """A checkpoint at 5, killed after 7, told to stop at an epoch's end: four steps an epoch, eight for ranks that all
    share each batch."""
    control, run, out = tmp_path / "c", tmp_path / "run", tmp_path / "o"
    code, said = start(tmp_path / "control", control, 0, strategy, ranks=ranks)
    assert code == 0, said[-3000:]
    code, said = start(run, out, 0, strategy, "--every", "5 steps", "--kill", "7", ranks=ranks)
    assert code not in (0, 143), said[-3000:]
    code, said = start(run, out, 1, strategy, "--term", "16" if strategy == "tp" else "12", ranks=ranks)
    assert "resumed from step 5" in said
    assert "stopping at step" in said
    code, said = start(run, out, 2, strategy, ranks=ranks)
    assert code == 0, said[-3000:]
    assert_same(out, control, ranks)
    # What has finished is not trained again.
    before = rows(out)
    code, said = start(run, out, 3, strategy, ranks=ranks)
    assert code == 0, said[-3000:]
    assert rows(out) == before


@pytest.mark.parametrize("strategy", ["ddp", "fsdp2"])
def test_one_rank_more_or_less(strategy: str, tmp_path: Path) -> None:
    """Two ranks, then one: the rest of the epoch once each; kept apart from the default, which cannot be had here."""
    code, said = start(tmp_path / "run", tmp_path / "o", 0, strategy, "--term", "6")
    assert "stopping at step" in said, said[-3000:]
    code, said = start(tmp_path / "run", tmp_path / "x", 1, strategy, ranks=1)
    assert code != 0
    assert "cannot keep the global batch" in said
    code, said = start(tmp_path / "run", tmp_path / "p", 2, strategy, "--on-resize", "accept", ranks=1)
    assert code == 0, said[-3000:]
    first, then = rows(tmp_path / "o"), rows(tmp_path / "p")
    stopped = max(step for _, step in first)
    seen = [i for (_, step), row in first.items() if step > 4 for i in row["ids"]]
    left = SAMPLES - len(seen)
    seen += [i for (_, step), row in sorted(then.items()) if step <= stopped + left // 4 for i in row["ids"]]
    assert sorted(seen) == list(range(SAMPLES))


def test_more_ranks_share_each_tensor(tmp_path: Path) -> None:
    """Two ranks of one tensor-parallel group, then four: each step has the samples it would have had, the same on all
    four, drawn alike by those that have no random state of their own."""
    code, said = start(tmp_path / "control", tmp_path / "c", 0, "tp")
    assert code == 0, said[-3000:]
    code, said = start(tmp_path / "run", tmp_path / "o", 0, "tp", "--term", "6")
    assert "stopping at step" in said, said[-3000:]
    code, said = start(tmp_path / "run", tmp_path / "p", 1, "tp", ranks=4)
    assert code == 0, said[-3000:]
    want, first, then = rows(tmp_path / "c"), rows(tmp_path / "o"), rows(tmp_path / "p")
    steps = {step for _, step in want}
    assert {step for _, step in first} | {step for _, step in then} == steps
    for (_, step), row in [*first.items(), *then.items()]:
        assert (row["ids"], row["lr"]) == (want[0, step]["ids"], want[0, step]["lr"])
    for (_, step), row in then.items():
        assert (row["x"], row["loss"]) == (then[0, step]["x"], then[0, step]["loss"])


def test_another_mesh(tmp_path: Path) -> None:
    """2 x 2 ranks (data x tensor), then four that split each tensor, read all data and draw alike: the rest of the
    epoch once."""
    code, said = start(tmp_path / "run", tmp_path / "o", 0, "2d", "--term", "6", ranks=4)
    assert "stopping at step" in said, said[-3000:]
    code, said = start(tmp_path / "run", tmp_path / "x", 1, "tp", ranks=4)
    assert code != 0
    assert "shared out to 2 ranks and are to 1 now" in said
    code, said = start(tmp_path / "run", tmp_path / "p", 2, "tp", "--on-resize", "accept", ranks=4)
    assert code == 0, said[-3000:]
    first, then = rows(tmp_path / "o"), rows(tmp_path / "p")
    stopped = max(step for _, step in first)
    seen = [i for (rank, step), row in first.items() if step > 4 and rank in (0, 2) for i in row["ids"]]
    left = (SAMPLES - len(seen)) // 4
    seen += [i for (rank, step), row in then.items() if step <= stopped + left and rank == 0 for i in row["ids"]]
    assert sorted(seen) == list(range(SAMPLES))
    assert all(row["x"] == then[0, step]["x"] for (_, step), row in then.items())
