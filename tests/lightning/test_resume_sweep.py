"""Interrupted after any step, under any schedule of validations, the fit continues at exactly the next event.

The control is the same fit, uninterrupted. Compared bit for bit: sample ids, losses, order of all events, validation
results, logged rows (epoch means included), weights, optimizer, scheduler, progress. The net has dropout and BatchNorm.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ._harness import Job, assert_continues, plain, stateful

SCHEDULES: dict[str, tuple[bool, dict[str, Any]]] = {
    "no validation": (False, {}),
    "per epoch": (True, {}),
    "half epochs": (True, {"val_check_interval": 0.5}),
    "every 3 batches": (True, {"val_check_interval": 3, "check_val_every_n_epoch": None}),
    "max_steps": (False, {"max_epochs": -1, "max_steps": 16}),
    "max_steps, validation": (True, {"max_epochs": -1, "max_steps": 16}),
}
LOADERS = {"plain": plain, "stateful": stateful}


def job(schedule: str, loader: str, workers: int = 0) -> Job:
    validation, trainer = SCHEDULES[schedule]
    return Job(loader=lambda: LOADERS[loader](workers), validation=validation, trainer=trainer)


@pytest.mark.parametrize("step", [3, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_continues(schedule: str, step: int, tmp_path: Path) -> None:
    assert_continues(job(schedule, "plain"), tmp_path, [step])


@pytest.mark.parametrize("step", [4, 8])
def test_continues_with_a_stateful_loader(step: int, tmp_path: Path) -> None:
    assert_continues(job("half epochs", "stateful"), tmp_path, [step])


@pytest.mark.parametrize("loader", LOADERS)
def test_continues_with_workers(loader: str, tmp_path: Path) -> None:
    assert_continues(job("per epoch", loader, workers=2), tmp_path, [5])


def test_continues_through_many_lives(tmp_path: Path) -> None:
    assert_continues(job("every 3 batches", "plain"), tmp_path, [2, 3, 6, 8, 9, 15], every="1 steps")


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_continues_after_every_step(schedule: str, loader: str, tmp_path: Path) -> None:
    for step in range(1, 16):
        assert_continues(job(schedule, loader), tmp_path / str(step), [step])


@pytest.mark.slow
@pytest.mark.parametrize("loader", LOADERS)
@pytest.mark.parametrize("schedule", ["no validation", "per epoch", "half epochs", "max_steps"])
def test_continues_after_many_steps_with_workers(schedule: str, loader: str, tmp_path: Path) -> None:
    for step in (1, 3, 4, 7, 8, 9, 12, 15):
        assert_continues(job(schedule, loader, workers=2), tmp_path / str(step), [step])
