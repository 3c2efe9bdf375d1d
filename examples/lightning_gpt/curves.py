"""TensorBoard curves that go on across lives of the job, without a gap and without an overlap.

A life that is killed has logged rows after its last commit; the next life logs those steps again. So rows from the
resumed step on are purged first (TensorBoard's own ``purge_step``). The row of the resumed step itself may or may not
have reached the file before the kill: it travels in the checkpoint and is written again.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch.utils.tensorboard import SummaryWriter


class Curves(Callback):
    """Writes ``train/loss`` each ``every`` optimizer steps, ``val/loss`` and the learning rate, from rank 0.

    It must run before the checkpoint is taken, so that what it has logged and what it remembers agree.
    """

    def __init__(self, folder: str, every: int = 5) -> None:
        self.folder = Path(folder)
        self.every = every
        self._writer: SummaryWriter | None = None
        self._step = 0  # of the newest row
        self._row: dict[str, float] = {}

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.is_global_zero:
            self._writer = SummaryWriter(str(self.folder), purge_step=self._step)
            self._write(self._row)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        step = trainer.global_step
        if step > self._step and step % self.every == 0:
            rate = trainer.optimizers[0].param_groups[0]["lr"]
            self._log(step, {"train/loss": float(outputs["loss"]), "train/lr": rate})

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking:
            self._log(trainer.global_step, {"val/loss": float(trainer.callback_metrics["val/loss"])})

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._step, "row": dict(self._row)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._step, self._row = state_dict["step"], dict(state_dict["row"])

    def _log(self, step: int, row: dict[str, float]) -> None:
        self._row = {**self._row, **row} if step == self._step else row
        self._step = step
        self._write(row)

    def _write(self, row: dict[str, float]) -> None:
        if self._writer is not None:
            for tag, value in row.items():
                self._writer.add_scalar(tag, value, self._step)
            self._writer.flush()  # a later commit must not outlive this row
