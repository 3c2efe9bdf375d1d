"""The data module: one global order, cut for the ranks, taken up at a global offset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_spot import ResumableDataModule

from ._harness import Job, Samples, assert_continues


class Data(ResumableDataModule):
    def train_dataset(self) -> Any:
        return Samples(30, augment=True)

    def val_dataset(self) -> Any:
        return [Samples(4), Samples(8)]


def job(**keyword: Any) -> Job:
    return Job(loader=lambda: Data(batch_size=4, seed=3, **keyword))


def test_continues(tmp_path: Path) -> None:
    control, _ = assert_continues(job(), tmp_path, [3])
    epochs = [sorted(i for batch in control.module.ids[at : at + 8] for i in batch) for at in (0, 8)]
    assert epochs == [list(range(30))] * 2
    assert control.module.ids[:8] != control.module.ids[8:]


def test_continues_with_workers(tmp_path: Path) -> None:
    assert_continues(job(num_workers=2, persistent_workers=True), tmp_path, [9])


def test_validation_has_a_loader_per_data_set() -> None:
    assert [len(loader) for loader in Data(batch_size=4).val_dataloader()] == [1, 2]
