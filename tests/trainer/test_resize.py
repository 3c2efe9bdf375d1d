"""Another number of processes: each sample once per epoch, the updates and their learning rates as before (S5, S6)."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate_spot.trainer import resizing
from spot_core.errors import TopologyError

from ._processes import lines_of, newest, spot_launch, start, torchrun


class Arguments:
    def __init__(self, world: int, accumulation: int) -> None:
        self.world_size, self.gradient_accumulation_steps, self.process_index = world, accumulation, 0


@pytest.mark.parametrize(
    ("saved", "before", "now", "given", "used"),
    [
        ({"given": 1, "used": 1}, 2, 1, 1, 2),
        ({"given": 1, "used": 1}, 2, 1, 2, 2),  # adapted by the user
        ({"given": 1, "used": 2}, 1, 1, 1, 2),  # the next start after it
        ({"given": 1, "used": 2}, 1, 2, 1, 1),  # and back
        ({"given": 6, "used": 6}, 2, 3, 6, 4),
        ({"given": 4, "used": 4}, 2, 2, 2, 2),  # the user's own change: refused later, by the length of the epoch
    ],
)
def test_the_global_batch_is_kept(saved: dict[str, int], before: int, now: int, given: int, used: int) -> None:
    found = resizing.accumulation(
        saved, saved_world=before, args=Arguments(now, given), on_resize="keep_global_batch"
    )
    assert found == used


def test_what_cannot_be_kept_is_refused() -> None:
    saved: dict[str, Any] = {"given": 1, "used": 1}
    with pytest.raises(TopologyError, match="2 batches in each update, which 3 processes cannot share"):
        resizing.accumulation(saved, saved_world=2, args=Arguments(3, 1), on_resize="keep_global_batch")
    with pytest.raises(TopologyError, match="on_resize is 'refuse'"):
        resizing.accumulation(saved, saved_world=2, args=Arguments(1, 1), on_resize="refuse")


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_one_two(tmp_path: Path) -> None:
    control, job = tmp_path / "control", tmp_path / "job"
    done = start(control, launcher=torchrun())
    assert done.returncode == 0, done.stdout[-3000:]
    stop = ("--pause", "0.05", "--every", "1000 steps", "--term")
    two = start(job, *stop, "5", launcher=spot_launch(job))
    assert two.returncode == 143, two.stdout[-3000:]
    first = newest(job)
    one = start(job, *stop, "20")
    assert one.returncode == 143, one.stdout[-3000:]
    assert "gradient_accumulation_steps is 2 now" in one.stdout
    assert newest(job) > first
    again = start(job, launcher=torchrun())
    assert again.returncode == 0, again.stdout[-3000:]
    seen = Counter(sample for rank in range(2) for row in lines_of(job, rank) for sample in row["ids"])
    # Each epoch, each of the 46 samples; 48 with two processes, where the last update is filled up.
    assert set(seen) == set(range(46))
    assert min(seen.values()) == 2
    assert sum(seen.values()) in range(2 * 46, 2 * 48 + 1)
    got, want = (torch.load(at / "out" / "final-rank0.pt", weights_only=True) for at in (job, control))
    assert got["step"] == want["step"]
    assert got["rates"] == want["rates"]


@pytest.mark.dist
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_and_three(tmp_path: Path) -> None:
    """6 batches in each update, 3 of each of two processes, then 2 of each of three."""
    control, job, accumulate = tmp_path / "control", tmp_path / "job", ("--accumulate", "3")
    assert start(control, *accumulate, launcher=torchrun()).returncode == 0
    told = start(
        job, *accumulate, "--pause", "0.05", "--every", "1000 steps", "--term", "4", launcher=spot_launch(job)
    )
    assert told.returncode == 143, told.stdout[-3000:]
    before = Counter(sample for rank in range(2) for row in lines_of(job, rank) for sample in row["ids"])
    assert len(before) < 46, "it is to go on in the middle of an epoch"
    again = start(job, *accumulate, launcher=torchrun(3))
    assert again.returncode == 0, again.stdout[-3000:]
    assert "gradient_accumulation_steps is 2 now" in again.stdout
    seen = Counter(sample for rank in range(3) for row in lines_of(job, rank) for sample in row["ids"])
    assert set(seen) == set(range(46))
    assert min(seen.values()) == 2
    assert sum(seen.values()) in range(2 * 46, 2 * 48 + 1)
    got, want = (torch.load(at / "out" / "final-rank0.pt", weights_only=True) for at in (job, control))
    assert got["step"] == want["step"]
    assert got["rates"] == want["rates"]
