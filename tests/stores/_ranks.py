"""A user's script for torchrun, with a blob of 21 MB from each of three ranks: ``_ranks.py STEPS``.

The run and its settings come from the environment alone.
"""

from __future__ import annotations

import sys

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, TensorDataset


class Model(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        # Replicated tensors are shared out among the ranks, so one of them each.
        self.layers = torch.nn.ModuleList(torch.nn.Linear(2300, 2300, bias=False) for _ in range(3))

    def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
        return torch.stack([layer(batch[0]).square().mean() for layer in self.layers]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(3)
    trainer = pl.Trainer(
        max_steps=int(sys.argv[1]),
        max_epochs=-1,
        accelerator="cpu",
        devices=3,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(), DataLoader(TensorDataset(torch.randn(24, 2300)), batch_size=2))


if __name__ == "__main__":
    main()
