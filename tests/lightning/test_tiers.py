"""`SpotCallback(run=..., local=...)`: both tiers filled, the local one resumed from, the same end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import SpotCallback
from spot_core.pytorch import fits
from spot_core.run import Run

from ._harness import SILENT, Killed


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self.layer(batch[0]).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class KillAfter(pl.Callback):
    def __init__(self, step: int | None) -> None:
        self.step = step

    def on_train_batch_start(self, trainer: pl.Trainer, *args: Any, **kwargs: Any) -> None:
        if trainer.global_step == self.step:
            raise Killed


def fit(folder: Path, kill_at: int | None = None) -> Module:
    fits._returned.clear()
    module = Module()
    pl.seed_everything(11)
    callback = SpotCallback(folder / "run", interval="2 steps", local=folder / "nvme", sources="none")
    trainer = pl.Trainer(max_epochs=2, callbacks=[callback, KillAfter(kill_at)], **SILENT)
    data = TensorDataset(torch.arange(32.0).reshape(8, 4) / 32)
    try:
        trainer.fit(module, DataLoader(data, batch_size=1, shuffle=True))
    except Killed:
        pass
    return module


def test_resumed_from_the_local_tier_and_the_same(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    control = fit(tmp_path / "control")
    fit(tmp_path / "job", kill_at=11)
    (tier,) = (tmp_path / "job" / "nvme").iterdir()
    assert Run.open(str(tier)).discover().generations[0].id.step == 10
    caplog.clear()
    again = fit(tmp_path / "job")
    assert f"the local tier {tier}" in caplog.text
    for mine, theirs in zip(again.state_dict().values(), control.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    newest = Run.open(str(tmp_path / "job" / "run")).discover().generations[0]
    assert newest.manifest.finished
    assert newest.id.step == 16
