"""A training that was killed and started again is the training that was not: ids, losses, rows, weights (S1-S3, R1)."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest

from ._harness import Job, Samples, assert_continues


@pytest.mark.parametrize(
    ("arguments", "kills"),
    [
        ({}, [3]),
        ({}, [11]),  # the last step of the first epoch
        ({}, [4, 15]),
        ({"gradient_accumulation_steps": 4}, [2]),
        ({"gradient_accumulation_steps": 4}, [3]),  # an epoch's last update, of 3 batches
        ({"gradient_accumulation_steps": 4, "logging_steps": 1}, [4]),
    ],
)
def test_continues(tmp_path: Path, arguments: dict[str, int], kills: list[int]) -> None:
    assert_continues(Job(partial(Samples, augment=True), arguments=arguments), tmp_path, kills)
