"""Another number of ranks from life to life, in the middle of epochs: each step has the samples it would have had."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from spot_core.run import Run

from ._harness import assert_equal

SCRIPT = Path(__file__).with_name("_resize_script.py")
SAMPLES = 70
pytestmark = pytest.mark.dist


@dataclass
class Steps:
    """What one or more starts did, by optimizer step."""

    ids: dict[int, list[int]] = field(default_factory=dict)
    lr: dict[int, float] = field(default_factory=dict)
    epoch: dict[int, int] = field(default_factory=dict)
    validated: list[tuple[int, int]] = field(default_factory=list)
    losses: list[tuple[str, int, float]] = field(default_factory=list)


def start(folder: Path, out: Path, ranks: int, name: str, *args: str) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("SPOT_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(SCRIPT), "--folder", str(folder), "--out", str(out), "--start", name]
    process = subprocess.Popen(
        [*command, "--devices", str(ranks), *args],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        try:
            os.killpg(process.pid, 9)
        except ProcessLookupError:
            pass
    return subprocess.CompletedProcess(process.args, process.returncode, output)


def steps(out: Path) -> Steps:
    found = Steps()
    for path in sorted(out.glob("*.jsonl")):
        for row in map(json.loads, path.read_text().splitlines()):
            if "validated" in row:
                if path.stem.endswith("rank0"):
                    found.validated.append((row["epoch"], row["validated"]))
                continue
            found.ids.setdefault(row["step"], []).extend(row["ids"])
            found.losses.append((path.stem.partition("-")[2], row["step"], row["loss"]))
            assert found.lr.setdefault(row["step"], row["lr"]) == row["lr"]
            found.epoch[row["step"]] = row["epoch"]
    for ids in found.ids.values():
        ids.sort()
    return found


def lives(folder: Path, out: Path, worlds: Sequence[int], terms: Sequence[int], *args: str) -> Steps:
    """Starts with each number of ranks, told to stop at the steps of `terms`, the last to the end."""
    for number, (ranks, term) in enumerate(zip(worlds, [*terms, None], strict=True)):
        stop = [] if term is None else ["--term", str(term)]
        done = start(folder, out, ranks, str(number), *args, "--seed", str(5 + number), *stop)
        assert done.returncode == (0 if term is None else 143), done.stdout[-3000:]
        if number:
            assert_loaded_is_what_was_saved(folder, out, number)
        if term is not None:
            keep_newest(folder, out, number)
    return steps(out)


def keep_newest(folder: Path, out: Path, number: int) -> None:
    """What the life left, as a plain reader sees it."""
    from spot_core.pytorch.loader import load

    run = Run.open(folder)
    state = load(run.store, run.verify(run.discover().generations[0]), rank=0, world=1).shared
    saved = {"model": state["state_dict"], "optimizer": state["optimizer_states"][0]["state"]}
    torch.save(saved, out / f"saved-{number}.pt")


def assert_loaded_is_what_was_saved(folder: Path, out: Path, number: int) -> None:
    saved, loaded = (
        torch.load(out / name, weights_only=True) for name in (f"saved-{number - 1}.pt", f"loaded-{number}.pt")
    )
    assert_equal(loaded, saved, "state")


def assert_as_the_control(got: Steps, want: Steps) -> None:
    """The same samples in every step, the same learning rate, the same validations."""
    assert got.ids == want.ids
    assert got.lr == want.lr
    assert got.epoch == want.epoch
    assert got.validated == want.validated


def assert_close(out: Path, control: Path) -> None:
    """Sums are taken in another order, so not bit for bit."""
    got, want = (torch.load(at / "final.pt", weights_only=True)["model"] for at in (out, control))
    for name in want:
        torch.testing.assert_close(got[name], want[name], rtol=2e-4, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("resumable", [False, True])
def test_two_ranks_one_rank_two_ranks(resumable: bool, tmp_path: Path) -> None:
    args = ("--accumulate", "2", "--validate-every", "4", *(["--resumable"] if resumable else []))
    control = lives(tmp_path / "control", tmp_path / "c", [2], [], *args)
    got = lives(tmp_path / "run", tmp_path / "o", [2, 1, 2], [2, 7], *args)
    assert_as_the_control(got, control)
    assert_close(tmp_path / "o", tmp_path / "c")


@pytest.mark.slow
@pytest.mark.parametrize("resumable", [False, True])
@pytest.mark.parametrize(("accumulate", "validate"), [(1, 1.0), (2, 0.5)])
def test_four_two_three_one_four(accumulate: int, validate: float, resumable: bool, tmp_path: Path) -> None:
    args = ["--accumulate", str(accumulate), "--validate-every", str(validate)]
    args += ["--resumable"] if resumable else []
    control = lives(tmp_path / "control", tmp_path / "c", [4], [], *args)
    terms = [2, 4, 6, 9] if accumulate == 1 else [1, 2, 4, 5]
    got = lives(tmp_path / "run", tmp_path / "o", [4, 2, 3, 1, 4], terms, *args)
    assert_as_the_control(got, control)
    assert_close(tmp_path / "o", tmp_path / "c")


@pytest.mark.slow
def test_an_accepted_change_trains_on_every_sample_once(tmp_path: Path) -> None:
    got = lives(tmp_path / "run", tmp_path / "o", [2, 1, 3], [3, 15], "--on-resize", "accept", "--accumulate", "2")
    for epoch in range(3):
        seen = Counter(i for step, ids in got.ids.items() if got.epoch[step] == epoch for i in ids)
        assert sorted(seen) == list(range(SAMPLES))
        assert sum(seen.values()) - SAMPLES < 3  # the padding of the last world
    assert sorted(got.ids) == list(range(len(got.ids)))
    assert [epoch for epoch, _ in got.validated] == [0, 1, 2]
    # One cycle of the 15 steps that two ranks would have taken, and its end for the rest.
    weight = torch.nn.Parameter(torch.zeros(1))
    cycle = torch.optim.lr_scheduler.OneCycleLR(torch.optim.AdamW([weight], lr=0.02), 0.05, total_steps=15)
    for step in range(len(got.lr)):
        assert got.lr[step] == pytest.approx(cycle.get_last_lr()[0]), step
        if step < 15:
            cycle.optimizer.step()
            cycle.step()
    assert len(got.lr) > 16


@pytest.mark.slow
def test_a_change_can_be_refused(tmp_path: Path) -> None:
    args = ("--on-resize", "refuse")
    assert start(tmp_path / "run", tmp_path / "o", 1, "0", *args, "--term", "3").returncode == 143
    refused = start(tmp_path / "run", tmp_path / "o", 2, "1", *args)
    assert refused.returncode not in (0, 143)
    assert "The run was saved by 1 ranks and is resumed by 2, and on_resize is 'refuse'" in refused.stdout
    assert start(tmp_path / "run", tmp_path / "o", 1, "2", *args).returncode == 0
