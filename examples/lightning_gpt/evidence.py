"""What the proof compares: which samples each rank saw at which batch, and the state at the end."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, TextIO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Evidence(Callback):
    """Appends a line ``{"batch", "step", "epoch", "ids", "loss", "at"}`` a batch to ``folder/rank<r>-life<n>.jsonl``.

    ``batch`` counts from the start of the run over all lives, ``step`` the optimizer steps done after it, ``at`` is
    Unix time. ``final.pt`` holds the weights and the optimizer.
    """

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)
        self._batches = 0
        self._file: TextIO | None = None

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        rank = trainer.global_rank
        earlier = len(list(self.folder.glob(f"rank{rank}-life*.jsonl")))
        self._file = (self.folder / f"rank{rank}-life{earlier:03d}.jsonl").open("x", encoding="utf-8")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        row = {
            "batch": self._batches,
            "step": trainer.global_step,
            "epoch": trainer.current_epoch,
            "ids": batch[0].tolist(),
            "loss": float(outputs["loss"]),
            "at": time.time(),
        }
        self._batches += 1
        if self._file is not None:
            self._file.write(json.dumps(row) + "\n")
            self._file.flush()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            final = {
                "step": trainer.global_step,
                "model": pl_module.state_dict(),
                "optimizer": trainer.optimizers[0].state_dict(),
            }
            unfinished = self.folder / "final.pt.part"
            torch.save(final, unfinished)
            os.replace(unfinished, self.folder / "final.pt")

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self._batches}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._batches = state_dict["batches"]
