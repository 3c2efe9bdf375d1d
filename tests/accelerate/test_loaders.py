"""What cannot be made exact is said at the start, with what to do; and nothing is said of the rest."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader, IterableDataset

from accelerate_spot.loaders import Loaders

from ._fresh import fresh  # noqa: F401 - of every test here
from .test_bad_input import Many

STATEFUL, AGAIN, DISPATCHED = "random draws in the workers", "Stream has no index", "dispatched by the first process"


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(4))

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("data", "workers", "options", "processes", "said"),
    [
        (torch.arange(4), 2, {}, 2, []),  # draws of workers are seeded by the sample
        (torch.arange(4), 2, {"use_stateful_dataloader": True}, 2, []),
        (Stream(), 0, {}, 1, [AGAIN]),
        (Stream(), 2, {}, 1, [AGAIN]),
        (Stream(), 0, {"use_stateful_dataloader": True}, 1, []),
        (Stream(), 2, {"use_stateful_dataloader": True}, 1, [STATEFUL]),
        (torch.arange(4), 0, {"dispatch_batches": True}, 2, [DISPATCHED]),
        (torch.arange(4), 0, {"dispatch_batches": True}, 1, []),
        (Stream(), 0, {"dispatch_batches": True}, 2, [AGAIN, DISPATCHED]),
    ],
)
def test_what_is_said(
    data: Any, workers: int, options: dict[str, Any], processes: int, said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "accelerate_spot")
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**options))
    accelerator.prepare(DataLoader(data, batch_size=2, num_workers=workers))
    Loaders(Many(accelerator, processes)).take_all()
    found = [m for m in caplog.messages if any(part in m for part in (STATEFUL, AGAIN, DISPATCHED))]
    assert len(found) == len(said)
    assert all(part in message for part, message in zip(said, found, strict=True))
