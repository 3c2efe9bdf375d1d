"""Samplers of one's own and weighted ones: exact for as many ranks, refused for others, which they are not made for."""

from __future__ import annotations

from pathlib import Path

import pytest

from .test_resize import lives, start
from .test_strategies import assert_same_run

pytestmark = [pytest.mark.dist, pytest.mark.slow]


@pytest.mark.parametrize(
    ("data", "ranks"),
    [("buckets", 2), ("weighted", 2), ("buckets", 1), ("drawn buckets", 1), ("drawn weighted", 1)],
)
def test_as_many_ranks_go_on_exactly(data: str, ranks: int, tmp_path: Path) -> None:
    """Told to stop in epoch 0, and in a later one. The "drawn" ones have no generator of their own."""
    per_epoch = 17 if data.endswith("buckets") and ranks == 1 else 8 if data == "buckets" else 18 if ranks == 1 else 9
    args = ("--data", data)
    control = lives(tmp_path / "control", tmp_path / "c", [ranks], [], *args)
    assert len(control.ids) == 3 * per_epoch
    lives(tmp_path / "run", tmp_path / "o", [ranks] * 3, [3, per_epoch + 4], *args)
    assert_same_run(tmp_path / "o", tmp_path / "c")


@pytest.mark.parametrize(("data", "named"), [("buckets", "Buckets"), ("weighted", "WeightedRandomSampler")])
def test_another_number_of_ranks_is_refused(data: str, named: str, tmp_path: Path) -> None:
    assert start(tmp_path / "run", tmp_path / "o", 2, "0", "--data", data, "--term", "3").returncode == 143
    refused = start(tmp_path / "run", tmp_path / "o", 1, "1", "--data", data)
    assert refused.returncode not in (0, 143)
    assert f"{named} does not say what that order is" in refused.stdout
    assert start(tmp_path / "run", tmp_path / "o", 2, "2", "--data", data).returncode == 0
