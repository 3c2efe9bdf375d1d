"""Modules and callbacks of the scenarios: what users do that a resume can get wrong."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ._harness import SAMPLES, Net, Samples


class Manual(Net):
    """Two optimizers stepped by hand; the second steps every `every` batches, its gradients add up in between."""

    def __init__(self, every: int = 1, *, raw: bool = False) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.other = nn.Linear(4, 1)
        self.every, self.raw = every, raw

    def training_step(self, batch: Any, batch_idx: int) -> None:
        first, second = self.trainer.optimizers if self.raw else self.optimizers()
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.events.append(("batch", self.trainer.current_epoch, batch_idx))
        first.zero_grad()
        loss.backward()
        first.step()
        (self.other(batch[0]) - 1).square().mean().backward()
        if (batch_idx + 1) % self.every == 0:
            second.step()
            second.zero_grad()

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.05), torch.optim.SGD(self.other.parameters(), lr=0.01)


class OneCycle(Net):
    """`estimated_stepping_batches` makes the loaders before the loops are restored."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        total = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=total)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Plateau(Net):
    """ReduceLROnPlateau, by epoch or by step: Lightning leaves it out in a resumed epoch."""

    def __init__(self, interval: str = "epoch", monitor: str = "mean") -> None:
        super().__init__()
        self.interval, self.monitor = interval, monitor

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.05)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": schedule, "interval": self.interval, "monitor": self.monitor},
        }


class TargetNetwork(Net):
    """An average of the weights kept by the module itself, in the hook that runs after every callback."""

    def __init__(self) -> None:
        super().__init__()
        self.target = nn.Linear(4, 8)
        self.register_buffer("calls", torch.zeros(()), persistent=False)

    def on_train_batch_end(self, *args: Any) -> None:
        self.calls += 1
        with torch.no_grad():
            for mine, theirs in zip(self.target.parameters(), self.net[0].parameters(), strict=True):
                mine.lerp_(theirs, 0.25)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weight = 1 + 0.01 * self.calls + 0.1 * self.target(batch[0]).detach().mean()
        return super().training_step(batch, batch_idx) * weight


class Two(Net):
    """Batches from a dict of loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        parts = [part for part in batch.values() if part is not None]
        x = torch.cat([part[0] for part in parts])
        ids = torch.cat([part[1] for part in parts])
        return super().training_step((x, ids), batch_idx)


class Searching(Net):
    """Has a learning rate for LearningRateFinder."""

    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.01

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=self.lr)


class Sizing(Net):
    """Makes its own loader, of a batch size that BatchSizeFinder finds."""

    def __init__(self) -> None:
        super().__init__()
        self.batch_size = 2

    def train_dataloader(self) -> Any:
        return DataLoader(Samples(), batch_size=self.batch_size, shuffle=True)


class WithHyperparameters(Net):
    """Hyperparameters that `torch.load(weights_only=True)` refuses."""

    def __init__(self, criterion: Any = None, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.scale = SAMPLES


class Averaged(Net):
    """Brings its averaging callback itself; such callbacks come after those of the Trainer."""

    def configure_callbacks(self) -> Any:
        return [pl.callbacks.EMAWeightAveraging(decay=0.5)]


class Unfreeze(pl.callbacks.BaseFinetuning):
    """Trains the first layer from epoch 1 on only."""

    def freeze_before_training(self, pl_module: Any) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer)
