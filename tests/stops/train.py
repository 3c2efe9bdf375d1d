"""A user's training script for the stop table, the same command at every start: `python train.py FOLDER`.

What a user would set is set in SPOT_* variables; how the test slows it down, in STOPS_* (which change no number).
Each rank appends what it did to `FOLDER/rank<r>.jsonl`: who it is, each batch, the start of each validation, its exit.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import sys
import threading
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader

from lightning_spot import SpotCallback
from tests.lightning._script import Evidence, Model, Noisy

PAUSE_S = float(os.environ.get("STOPS_PAUSE", "0"))
VALIDATION_PAUSE_S = float(os.environ.get("STOPS_VALIDATION_PAUSE", "0"))
WORKERS = int(os.environ.get("STOPS_WORKERS", "0"))
DEVICES = int(os.environ.get("STOPS_DEVICES", "1"))  # under no torchrun
EXIT_PAUSE_S = float(os.environ.get("STOPS_EXIT_PAUSE", "0"))  # on rank 0
EPOCHS = int(os.environ.get("STOPS_EPOCHS", "10"))


class Trace(Evidence):
    """Evidence with who and when, so that the test can aim."""

    rank = 0

    def say(self, **row: Any) -> None:
        with (self.out / f"rank{self.rank}.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.rank = trainer.global_rank
        self.say(pid=os.getpid())

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.say(validation=self.batches)

    def on_validation_batch_start(self, *args: Any) -> None:
        threading.Event().wait(VALIDATION_PAUSE_S)


def leave_slowly(trace: Trace) -> None:
    """As libraries do that send something off at the interpreter's exit."""
    if trace.rank == 0 and EXIT_PAUSE_S:
        trace.say(leaving=True)
        threading.Event().wait(EXIT_PAUSE_S)
        trace.say(left=True)


def main() -> None:
    folder = Path(sys.argv[1])
    logging.basicConfig(level=logging.INFO, format="%(levelname)s %(name)s: %(message)s")
    torch.set_num_threads(1)
    folder.mkdir(parents=True, exist_ok=True)
    pl.seed_everything(5, verbose=False)
    local, world = int(os.environ.get("LOCAL_WORLD_SIZE", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    devices, nodes = (local, world // local) if local else (DEVICES, 1)
    trace = Trace(folder, None, None, False, "all")
    atexit.register(leave_slowly, trace)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=nodes,
        strategy="ddp" if devices * nodes > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[trace, SpotCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        num_sanity_val_steps=0,
    )
    train = DataLoader(Noisy(), batch_size=4, shuffle=True, num_workers=WORKERS)
    validation = DataLoader(Noisy(), batch_size=4, num_workers=WORKERS)
    try:
        trainer.fit(Model(PAUSE_S), train, validation)
    except SystemExit as stop:
        trace.say(exit=stop.code)
        raise


if __name__ == "__main__":
    main()
