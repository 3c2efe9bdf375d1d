"""W9: whether a snapshot fits is estimated and said before the first batch, not found out at the first save."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import SpotCallback
from spot_core import memory
from spot_core.pytorch import modules

from ._harness import SILENT


class Module(pl.LightningModule):
    """100 trained parameters, 50 frozen ones, one buffer of 10, in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.trained = nn.Parameter(torch.zeros(100))
        self.frozen = nn.Parameter(torch.zeros(50), requires_grad=False)
        self.register_buffer("counts", torch.zeros(10))
        self.said: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (self.trained.sum() + batch[0].sum()) ** 2

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([self.trained], lr=0.1)


def test_the_estimate() -> None:
    module = Module()
    adam = [module.configure_optimizers()]
    assert modules.expected_bytes(module, adam, 1) == 4 * (150 + 2 * 100 + 10), "Adam's state is still to come"
    module.trained.grad = torch.ones(100)
    adam[0].step()
    assert modules.expected_bytes(module, adam, 1) == 4 * (150 + 2 * 100 + 1 + 10), "its real state, the step included"
    other = [module.configure_optimizers()]
    assert modules.expected_bytes(module, other, 2) == 4 * (150 + 2 * 100) // 2 + 4 * 10, "ranks share"


@pytest.mark.parametrize(("free", "warned"), [(64, True), (1 << 40, False)])
def test_said_before_the_first_batch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, free: int, warned: bool
) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: free)
    seen: list[bool] = []

    class Look(pl.Callback):
        def on_train_batch_start(self, *args: Any, **kwargs: Any) -> None:
            seen.append(any("will not fit" in record.message for record in caplog.records))

    trainer = pl.Trainer(max_epochs=1, callbacks=[SpotCallback(tmp_path / "run", interval="1h"), Look()], **SILENT)
    with caplog.at_level(logging.INFO):
        trainer.fit(Module(), DataLoader(TensorDataset(torch.ones(2, 1))))
    assert seen[0] is warned
