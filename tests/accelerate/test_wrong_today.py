"""Setups in which plain accelerate 1.15 repeats or leaves out samples after a resume, or ends with other weights.

The names are those of accelerate's options. Random draws in the data set and dropout are on in all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from ._evidence import assert_continued
from ._starts import start

SETUPS: dict[str, tuple[int, tuple[object, ...]]] = {
    "shuffle": (1, ()),
    "shuffle, workers": (1, ("--workers", 2)),
    "shuffle, 2 processes": (2, ()),
    "shuffle, 2 processes, workers": (2, ("--workers", 2)),
    "seedable": (1, ("--seedable",)),
    "seedable, workers": (1, ("--seedable", "--workers", 2)),
    "seedable, 2 processes": (2, ("--seedable",)),
    "seedable, 2 processes, workers": (2, ("--seedable", "--workers", 2)),
    "stateful": (1, ("--stateful",)),
    "stateful, workers": (1, ("--stateful", "--workers", 2)),
    "stateful, 2 processes": (2, ("--stateful",)),
    "stateful, 2 processes, workers": (2, ("--stateful", "--workers", 2)),
    "stateful and seedable, workers": (1, ("--stateful", "--seedable", "--workers", 2)),
    "stateful and seedable, 2 processes, workers": (2, ("--stateful", "--seedable", "--workers", 2)),
    "accumulation": (1, ("--accumulate", 4)),
    "accumulation, 2 processes": (2, ("--accumulate", 4)),
    "split": (2, ("--split", "--seedable")),
    "dispatch": (2, ("--dispatch",)),
    "dispatch, workers": (2, ("--dispatch", "--workers", 2)),
}

FAST = {"stateful", "dispatch"}


@pytest.mark.parametrize(
    "setup", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in SETUPS]
)
def test_right_here(tmp_path: Path, control: Callable[..., Path], setup: str) -> None:
    """Stopped in the middle of epoch 0, at its end, in the middle of epoch 1."""
    processes, options = SETUPS[setup]
    per_epoch = 8
    count = ("--count", 32 if "--split" in options else 32 * processes)
    want = control(*options, *count, processes=processes)
    for after in (3, 5, 4):
        codes = start(
            tmp_path / "out", *options, *count, "--after", after, "--signal", "SIGTERM",
            run=tmp_path / "run", processes=processes,
        )
        assert set(codes) == {143}
    assert start(tmp_path / "out", *options, *count, run=tmp_path / "run", processes=processes) == [0] * processes
    begins = assert_continued(tmp_path / "out", want, ranks=processes)
    assert len(begins) == 4
    assert begins[1] < per_epoch < begins[-1]
