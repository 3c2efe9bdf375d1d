"""A small script with a `Trainer` and SpotTrainerCallback, for ckpt-chaos: `python chaos_trainer.py OUT WRITER`."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

from accelerate_spot.trainer import SpotTrainerCallback


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Dropout(0.2), nn.ReLU(), nn.Linear(32, 1))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": nn.functional.mse_loss(self.layers(x), labels)}


class Sums(Dataset[Any]):
    def __init__(self) -> None:
        self.inputs = torch.randn(96, 8, generator=torch.Generator().manual_seed(3))

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        x = self.inputs[index]
        return {"x": x, "labels": x.sum(0, keepdim=True)}


def main() -> None:
    out, writer = Path(sys.argv[1]), sys.argv[2]
    logging.basicConfig(level=logging.INFO)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(3)
    args = TrainingArguments(
        output_dir=str(out / "own"),
        num_train_epochs=2,
        per_device_train_batch_size=8 // world,
        learning_rate=1e-2,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
        dataloader_pin_memory=False,
    )
    spot = SpotTrainerCallback(out / "run", interval="4 steps", keep=100, writer=writer)
    trainer = Trainer(Net(), args, train_dataset=Sums(), callbacks=[spot])
    trainer.train()
    if trainer.is_world_process_zero():
        torch.save(trainer.model.state_dict(), out / "final.pt")


if __name__ == "__main__":
    main()
