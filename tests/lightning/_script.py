"""A training script as a user's, run in processes that are killed: `python _script.py --folder DIR --out DIR [...]`.

Appends a line per batch to `<out>/rank<r>.jsonl`, and writes `<out>/final-rank<r>.pt` at the end.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset

from lightning_spot import SpotCallback


class Noisy(Dataset[Any]):
    """Augmented by all generators, so that the workers' random state shows."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        return torch.randn(4) * 0.1 + index / 10, index


class Model(pl.LightningModule):
    def __init__(self, delay: float, base: int = 0) -> None:
        super().__init__()
        frozen = [torch.nn.Linear(4, base), torch.nn.Linear(base, base), torch.nn.Linear(base, 4)] if base else []
        self.base = torch.nn.Sequential(*frozen).requires_grad_(False)
        self.net = torch.nn.Sequential(
            torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1)
        )
        self.delay = torch.nn.Parameter(torch.zeros(()), requires_grad=False)
        self.pause = delay

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        x, ids = batch
        if self.pause:
            import threading

            threading.Event().wait(self.pause)
        x = x + self.base(x) if self.base else x
        loss = (self.net(x) - ids.float().unsqueeze(1) / 64).square().mean()
        self.log("loss", loss, on_epoch=True)
        return {"loss": loss}

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.pause:
            import threading

            threading.Event().wait(self.pause)
        self.log("val", self.net(batch[0]).mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.02)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Evidence(pl.Callback):
    def __init__(self, out: Path, kill: int | None, term: int | None, term_in_validation: bool, ranks: str) -> None:
        self.out, self.kill, self.term, self.in_validation, self.ranks = out, kill, term, term_in_validation, ranks
        self.fail: int | None = None
        self.batches = 0

    def state_dict(self) -> dict[str, Any]:
        return {"batches": self.batches}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.batches = state["batches"]

    def _mine(self, trainer: Any) -> bool:
        return self.ranks == "all" or str(trainer.global_rank) in self.ranks.split(",")

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        row = {"batch": self.batches, "ids": batch[1].tolist(), "loss": float(outputs["loss"])}
        self.batches += 1
        with (self.out / f"rank{trainer.global_rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if self.kill is not None and self.batches == self.kill and self._mine(trainer):
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail is not None and self.batches == self.fail and self._mine(trainer):
            raise ValueError("something is wrong with this batch")
        if self.term is not None and self.batches == self.term and self._mine(trainer) and not self.in_validation:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_batch_start(self, trainer: Any, *args: Any) -> None:
        if self.in_validation and not trainer.sanity_checking and self.batches == self.term and self._mine(trainer):
            os.kill(os.getpid(), signal.SIGTERM)
            self.term = None

    def on_train_end(self, trainer: Any, module: Any) -> None:
        final = {"model": module.state_dict(), "optimizer": trainer.optimizers[0].state_dict()}
        torch.save(final, self.out / f"final-rank{trainer.global_rank}.pt")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--every", default="2 steps")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--kill", type=int)
    parser.add_argument("--term", type=int)
    parser.add_argument("--ranks", default="all")
    parser.add_argument("--in-validation", action="store_true")
    parser.add_argument("--fail", type=int)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--base", type=int, default=0, help="width of a frozen base")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    args.out.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(5, verbose=False)
    evidence = Evidence(args.out, args.kill, args.term, args.in_validation, args.ranks)
    evidence.fail = args.fail
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=args.devices,
        strategy="ddp" if args.devices > 1 else "auto",
        max_epochs=args.epochs,
        accumulate_grad_batches=args.accumulate,
        callbacks=[evidence, SpotCallback(args.folder, args.every, sources="signals")],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=args.workers)
    trainer.fit(Model(args.pause, args.base), train, DataLoader(Noisy(), batch_size=16))


if __name__ == "__main__":
    main()
