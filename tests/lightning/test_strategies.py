"""Strategies that shard the model, on gloo: saved by every rank, resumed exactly, and taken over by other ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ._harness import assert_equal
from .test_resize import assert_as_the_control, assert_close, keep_newest, lives, start, steps

pytestmark = [pytest.mark.dist, pytest.mark.slow]

STRATEGIES = {"ddp": 2, "fsdp1": 2, "fsdp1-full": 2, "fsdp2": 2, "tp": 2, "2d": 4}
"""With the number of ranks that each is tried with."""


def assert_same_run(out: Path, control: Path) -> None:
    """Samples, losses and learning rates of every rank and step, weights and optimizer state, bit for bit."""
    got, want = steps(out), steps(control)
    assert_as_the_control(got, want)
    assert sorted(got.losses) == sorted(want.losses)
    final, wanted = (torch.load(folder / "final.pt", weights_only=True) for folder in (out, control))
    assert_equal(final, wanted, "state")


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_twenty_steps_killed_after_ten(strategy: str, tmp_path: Path) -> None:
    """Train 20; a checkpoint at 10, killed after it, resumed: at 20 everything is the same."""
    ranks = STRATEGIES[strategy]
    args = ("--strategy", strategy, "--max-steps", "20")
    assert start(tmp_path / "control", tmp_path / "c", ranks, "0", *args).returncode == 0
    killed = start(tmp_path / "run", tmp_path / "o", ranks, "0", *args, "--every", "10 steps", "--kill", "14")
    assert killed.returncode not in (0, 143), killed.stdout[-3000:]
    keep_newest(tmp_path / "run", tmp_path / "o", 0)
    for path in (tmp_path / "o").glob("0-*.jsonl"):  # what came after the checkpoint is trained again
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(line for line in lines if '"step"' not in line or _step(line) < 10))
    done = start(tmp_path / "run", tmp_path / "o", ranks, "1", *args)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "resumed from step 10" in done.stdout
    saved, loaded = (torch.load(tmp_path / "o" / name, weights_only=True) for name in ("saved-0.pt", "loaded-1.pt"))
    assert_equal(loaded, saved, "loaded")
    assert_same_run(tmp_path / "o", tmp_path / "c")


def _step(line: str) -> int:
    return int(json.loads(line)["step"])


@pytest.mark.parametrize("stop", [3, 9, 13, 18], ids=["epoch 0", "epoch end", "later", "epoch end again"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_told_to_stop_anywhere_and_resumed_by_as_many(strategy: str, stop: int, tmp_path: Path) -> None:
    """Nine steps an epoch with two ranks, five with four."""
    ranks = STRATEGIES[strategy]
    control = lives(tmp_path / "control", tmp_path / "c", [ranks], [], "--strategy", strategy)
    assert control.ids
    lives(tmp_path / "run", tmp_path / "o", [ranks, ranks], [stop - 1], "--strategy", strategy)
    assert_same_run(tmp_path / "o", tmp_path / "c")


@pytest.mark.parametrize(
    ("strategy", "worlds", "terms"),
    [
        ("fsdp1", [4, 2, 3, 4], [2, 5, 9]),
        ("fsdp2", [4, 2, 3, 4], [2, 5, 9]),
        ("tp", [2, 4, 2, 4], [4, 17, 24]),  # all of them share each batch: 18 steps an epoch
        ("2d", [4, 2, 4, 2], [3, 8, 13]),  # two for the data, one, two, one
    ],
)
def test_other_ranks_take_over_the_shards(
    strategy: str, worlds: list[int], terms: list[int], tmp_path: Path
) -> None:
    """Tensors bit-equal after each load (`lives` looks), every step with the samples and learning rate it had; stopped
    in epoch 0, later, and at the end of an epoch."""
    args = ("--strategy", strategy)
    control = lives(tmp_path / "control", tmp_path / "c", worlds[:1], [], *args)
    got = lives(tmp_path / "run", tmp_path / "o", worlds, terms, *args)
    if strategy in ("tp", "2d"):  # a batch is in the evidence of each rank that shares it
        for found in (control, got):
            found.ids = {step: sorted(set(ids)) for step, ids in found.ids.items()}
    assert_as_the_control(got, control)
    assert_close(tmp_path / "o", tmp_path / "c")


def test_another_mesh_takes_over_the_shards(tmp_path: Path) -> None:
    """2 x 2 ranks (data x tensor), then 4 for the data, then 2 that split each tensor."""
    for number, (strategy, ranks, term) in enumerate([("2d", 4, 3), ("fsdp2", 4, 8), ("tp", 2, None)]):
        stop = [] if term is None else ["--term", str(term)]
        done = start(tmp_path / "run", tmp_path / "o", ranks, str(number), "--strategy", strategy, *stop)
        assert done.returncode == (0 if term is None else 143), done.stdout[-3000:]
        if number:
            saved, loaded = (
                torch.load(tmp_path / "o" / f"{name}.pt", weights_only=True)
                for name in (f"saved-{number - 1}", f"loaded-{number}")
            )
            assert_equal(loaded, saved, "loaded")
        if term is not None:
            keep_newest(tmp_path / "run", tmp_path / "o", number)


def test_a_whole_model_is_not_taken_for_a_sharded_one(tmp_path: Path) -> None:
    assert start(tmp_path / "run", tmp_path / "o", 2, "0", "--term", "3").returncode == 143
    refused = start(tmp_path / "run", tmp_path / "o", 2, "1", "--strategy", "fsdp2")
    assert refused.returncode not in (0, 143)
    assert "was written with DDPStrategy, and the strategy is ModelParallelStrategy now" in refused.stdout
