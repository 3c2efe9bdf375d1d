"""Another number of processes in each life: every sample once per epoch, learning rates by update as before."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ._evidence import lives
from ._starts import start

COUNT, BATCH, EPOCHS = 96, 4, 3


def rows_of(out: Path, life: int, processes: int) -> list[list[Any]]:
    """Per rank the batches of a life."""
    return [[row for row in lives(out, rank)[life] if row[0] != "eval"] for rank in range(processes)]


def live(tmp_path: Path, worlds: list[int], stops: list[int], *options: Any, **keyword: Any) -> list[list[list[Any]]]:
    """One start per entry of `worlds`; all but the last are told to stop after so many batches. Batches by life, rank.

    A rank that a life does not have writes nothing in it: its file has a start less.
    """
    found, seen = [], Counter[int]()
    for number, processes in enumerate(worlds):
        told = ("--after", stops[number], "--signal", "SIGTERM") if number < len(stops) else ()
        codes = start(
            tmp_path / "out", "--count", COUNT, *options, *told, run=tmp_path / "run", processes=processes, **keyword
        )
        assert set(codes) == ({143} if told else {0})
        found.append(
            [
                [row for row in lives(tmp_path / "out", rank)[seen[rank]] if row[0] != "eval"]
                for rank in range(processes)
            ]
        )
        seen.update(range(processes))
    return found


def samples(found: list[list[list[Any]]]) -> dict[int, Counter[int]]:
    """By epoch, how often each sample was trained on."""
    by_epoch: dict[int, Counter[int]] = {}
    for life in found:
        for rank in life:
            for epoch, _, ids, _, _ in rank:
                by_epoch.setdefault(epoch, Counter()).update(ids)
    return by_epoch


def rates(found: list[list[list[Any]]]) -> list[float]:
    """Learning rates of rank 0, one for each run of batches that has it."""
    flat = [rate for life in found for *_, rate in life[0]]
    return [rate for index, rate in enumerate(flat) if index == 0 or rate != flat[index - 1]]


def assert_each_once(found: list[list[list[Any]]]) -> None:
    assert samples(found) == {epoch: Counter(range(COUNT)) for epoch in range(EPOCHS)}


@pytest.mark.parametrize(
    ("worlds", "stops", "accumulate"),
    [
        pytest.param([2, 1, 2], [5, 12], 1, id="2-1-2"),
        pytest.param([1, 2, 1], [7, 5], 2, id="1-2-1", marks=pytest.mark.slow),
        pytest.param([2, 3], [7], 3, id="2-3, kept by accumulation", marks=pytest.mark.slow),
        pytest.param([1, 2], [6], 4, id="1-2, told in the middle of an accumulation", marks=pytest.mark.slow),
        pytest.param([2, 1], [12], 1, id="2-1, at an epoch's end", marks=pytest.mark.slow),
    ],
)
def test_the_global_batch_is_kept(tmp_path: Path, worlds: list[int], stops: list[int], accumulate: int) -> None:
    found = live(tmp_path, worlds, stops, "--accumulate", accumulate)
    assert_each_once(found)
    updates = COUNT // (BATCH * worlds[0] * accumulate) * EPOCHS
    # One processes' worth of scheduler steps per update, as accelerate does it in the first life.
    curve = [0.02 * 0.97 ** (worlds[0] * update) for update in range(updates + 1)]
    got = rates(found)
    assert got == pytest.approx([rate for rate in curve if rate in got or rate == curve[-1]] or curve)
    assert got[-1] == pytest.approx(curve[-1])
    assert len(got) in (updates, updates + 1)


@pytest.mark.slow
def test_two_and_three_without_accumulation(tmp_path: Path) -> None:
    """2 batches cannot be shared out to 3: refused, or accepted by choice; then too each sample comes once."""
    start(
        tmp_path / "out", "--count", COUNT, "--after", 6, "--signal", "SIGTERM", run=tmp_path / "run", processes=2
    )
    with pytest.raises(AssertionError, match="cannot keep its global batch"):
        start(tmp_path / "refused", "--count", COUNT, run=tmp_path / "run", processes=3)
    found = live(
        tmp_path / "accepted", [2, 3], [6], environment={"ACCELERATE_SPOT_ON_RESIZE": "accept"}
    )
    assert_each_once(found)


@pytest.mark.slow
@pytest.mark.parametrize("options", [("--seedable",), ("--stateful",), ("--workers", 2), ("--split",), ("--dispatch",)])
def test_other_loaders(tmp_path: Path, options: tuple[Any, ...]) -> None:
    found = live(tmp_path, [2, 1, 2], [5, 9], *options)
    assert_each_once(found)
