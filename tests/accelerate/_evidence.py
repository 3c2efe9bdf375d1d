"""What each start of a script went through, against a script that nobody interrupted: every row, bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch


def lives(out: Path, rank: int = 0) -> list[list[Any]]:
    """The rows of each start: a batch is [epoch, step, ids, loss, rate], an evaluation ["eval", epoch, value]."""
    found: list[list[Any]] = []
    for line in (out / f"rank{rank}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row == "start":
            found.append([])
        else:
            found[-1].append(row)
    return found


def assert_continued(out: Path, control: Path, *, ranks: int = 1, lost: int | None = 0) -> list[int]:
    """Each start repeats a stretch of the control's rows, no row is left out, and the ends are equal.

    lost: batches that each start may go through again; None for any number. Returns where the starts of rank 0 began.
    """
    begins: list[int] = []
    for rank in range(ranks):
        (want,) = lives(control, rank)
        at = 0
        for number, rows in enumerate(lives(out, rank)):
            if not rows:
                continue
            begin = next((i for i, row in enumerate(want) if row == rows[0]), None)
            assert begin is not None, f"start {number} of rank {rank} begins with a row nobody else has: {rows[0]}"
            for index, row in enumerate(rows):
                other = want[begin + index]
                assert row == other, f"start {number} of rank {rank}, row {index}: {row}, the control has {other}"
            assert begin <= at, f"start {number} of rank {rank} left out rows {at} to {begin}"
            if lost is not None:
                again = [row for row in want[begin:at] if row[0] != "eval"]
                assert len(again) <= lost, f"start {number} of rank {rank} went through {len(again)} batches again"
            at = begin + len(rows)
            if rank == 0:
                begins.append(begin)
        assert at == len(want), f"rank {rank} ended at row {at} of {len(want)}"
        assert_same_end(out, control, rank)
    return begins


def assert_same_end(out: Path, control: Path, rank: int = 0) -> None:
    got, want = (
        torch.load(folder / f"final-rank{rank}.pt", weights_only=True) for folder in (out, control)
    )
    assert_same(got, want, f"rank {rank}")


def assert_same(got: Any, want: Any, where: str) -> None:
    if isinstance(want, torch.Tensor):
        assert torch.equal(got, want), where
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key, value in want.items():
            assert_same(got[key], value, f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), where
        for index, value in enumerate(want):
            assert_same(got[index], value, f"{where}[{index}]")
    else:
        assert got == want, where
