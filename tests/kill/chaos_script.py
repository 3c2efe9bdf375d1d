"""A small training script that uses SpotCallback, for ckpt-chaos: `python chaos_script.py OUT WRITER`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_spot import SpotCallback


class Net(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.layers(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)


def main() -> None:
    out, writer = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world > 1:
        # ckpt-chaos starts the ranks itself; this says to Lightning that they are there.
        os.environ.setdefault("TORCHELASTIC_RUN_ID", "chaos")
    seed_everything(3)
    inputs = torch.randn(96, 8)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    module = Net()
    trainer = Trainer(
        accelerator="cpu",
        devices=world,
        strategy="ddp" if world > 1 else "auto",
        max_epochs=2,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[SpotCallback(run=out / "run", interval="4 steps", keep=100, writer=writer)],
    )
    trainer.fit(module, DataLoader(data, batch_size=8 // world, shuffle=True))
    if trainer.is_global_zero:
        torch.save(module.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main()
