"""Weighted samplers, and batch samplers of the script's own, such as one that puts samples of like length together."""

from __future__ import annotations

from pathlib import Path

import pytest

from ._evidence import assert_continued
from ._starts import start
from .test_world_size import COUNT, live, samples

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("data", ["buckets", "weighted"])
def test_killed_and_told_and_the_same(data: str, ranks: int, workers: int, tmp_path: Path) -> None:
    control, out, run = tmp_path / "control", tmp_path / "out", tmp_path / "run"
    options = ("--data", data, "--workers", workers, "--count", 48)
    assert start(control, *options, run=tmp_path / "control-run", processes=ranks) == [0] * ranks
    assert start(out, *options, "--after", 5, run=run, processes=ranks, interval="2 steps") == [-9] * ranks
    told = (*options, "--after", 12 // ranks + 2, "--signal", "SIGTERM")
    assert start(out, *told, run=run, processes=ranks) == [143] * ranks
    assert start(out, *options, run=run, processes=ranks) == [0] * ranks
    assert_continued(out, control, ranks=ranks, lost=None)


@pytest.mark.parametrize("data", ["buckets", "weighted"])
def test_another_number_of_processes(data: str, tmp_path: Path) -> None:
    """Batches are shared out whole, in the order in which the sampler gives them."""
    control = live(tmp_path / "control", [2], [], "--data", data)
    found = live(tmp_path / "o", [2, 1, 2], [5, 12], "--data", data)
    assert samples(found) == samples(control)
    if data == "buckets":
        assert all(set(epoch) == set(range(COUNT)) for epoch in samples(found).values())
