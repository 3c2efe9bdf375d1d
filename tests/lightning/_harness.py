"""A small fit whose every event is recorded, an interruption at a chosen step, and the comparison with the control."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import torch
import torchmetrics
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_spot import SpotCallback
from spot_core.pytorch import fits

SAMPLES = 32
BATCH = 4  # 8 batches per epoch


SILENT: dict[str, Any] = {
    "accelerator": "cpu",
    "devices": 1,
    "logger": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "enable_checkpointing": False,
}
"""Keywords of a Trainer for tests that need no record."""


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the script runs after it except what Lightning itself does on the way out."""


class Samples(Dataset[Any]):
    """Item i is (features, i). With `augment` the features depend on all three random generators."""

    def __init__(self, count: int = SAMPLES, *, augment: bool = False) -> None:
        self.count, self.augment = count, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x = torch.arange(4, dtype=torch.float32) * 0.1 + index / 10
        if self.augment:
            x = x + random.random() + float(np.random.rand()) + torch.rand(())
        return x, index


class Stream(IterableDataset[Any]):
    """The same items without length or index, split over workers."""

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        info = get_worker_info()
        first, stride = (info.id, info.num_workers) if info else (0, 1)
        for index in range(first, SAMPLES, stride):
            yield torch.arange(4, dtype=torch.float32) * 0.1 + index / 10, index


def plain(workers: int = 0, *, shuffle: bool = True, augment: bool = False, **keyword: Any) -> DataLoader[Any]:
    return DataLoader(Samples(augment=augment), batch_size=BATCH, shuffle=shuffle, num_workers=workers, **keyword)


def stateful(workers: int = 0, *, shuffle: bool = True, augment: bool = False) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Samples(augment=augment), batch_size=BATCH, shuffle=shuffle, num_workers=workers)


def stream(workers: int = 0) -> DataLoader[Any]:
    return DataLoader(Stream(), batch_size=BATCH, num_workers=workers)


def stateful_stream(workers: int = 0) -> StatefulDataLoader[Any]:
    return StatefulDataLoader(Stream(), batch_size=BATCH, num_workers=workers)


class Net(pl.LightningModule):
    """Dropout, BatchNorm, a step scheduler, an epoch mean and a torchmetrics state: whatever is forgotten shows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1))
        self.mean = torchmetrics.MeanMetric()
        self.ids: list[list[int]] = []
        self.losses: list[float] = []
        self.events: list[tuple[Any, ...]] = []

    def on_train_start(self) -> None:
        # Drawn at every start, by user code: it must not move what the training draws.
        random.random(), np.random.rand(), torch.rand(3)

    def loss(self, batch: Any) -> Tensor:
        x, ids = batch
        self.ids.append(ids.tolist())
        return (self.net(x) - ids.float().unsqueeze(1) / SAMPLES).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss))
        self.events.append(("batch", self.trainer.current_epoch, batch_idx))
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.mean.update(loss.detach())
        self.log("mean", self.mean, on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        x, ids = batch
        self.log("val", (self.net(x) - ids.float().unsqueeze(1) / SAMPLES).square().mean())

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            value = float(self.trainer.callback_metrics["val"])
            self.events.append(("val", self.trainer.current_epoch, self.trainer.global_step, value))

    def on_train_epoch_end(self) -> None:
        self.events.append(("epoch_end", self.trainer.current_epoch, self.trainer.global_step))

    def on_train_end(self) -> None:
        self.events.append(("end", self.trainer.current_epoch, self.trainer.global_step))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(filter(lambda p: p.requires_grad, self.parameters()), lr=0.05)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.8)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Rows(Logger):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[str, int | None, float]] = []

    @property
    def name(self) -> str:
        return "rows"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        pass

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.rows += [(key, step, float(value)) for key, value in metrics.items() if key != "epoch"]


class KillAfterSave(pl.Callback):
    """Raises `Killed` at the first event after the generation of `step` was committed."""

    def __init__(self, step: int, spot: Any) -> None:
        self.step, self.spot = step, spot

    def _check(self, trainer: Any) -> None:
        fit = self.spot._fit
        if not trainer.sanity_checking and fit is not None and fit._saved_step >= self.step:
            fit._session.drain()
            raise Killed

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        self._check(trainer)

    def on_validation_start(self, trainer: Any, *args: Any) -> None:
        self._check(trainer)

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        self._check(trainer)


@dataclass
class Outcome:
    module: Any
    trainer: Any
    rows: list[Any]
    killed: bool
    steps_before: int = 0

    @property
    def state(self) -> dict[str, Any]:
        return {
            "model": {key: value.clone() for key, value in self.module.state_dict().items()},
            "optimizers": [optimizer.state_dict() for optimizer in self.trainer.optimizers],
            "schedulers": [config.scheduler.state_dict() for config in self.trainer.lr_scheduler_configs],
            "progress": (self.trainer.global_step, self.trainer.current_epoch),
        }


@dataclass
class Job:
    """A script: `start` is one start of it."""

    loader: Callable[[], Any] = plain
    module: Callable[[], Any] = Net
    validation: bool = False
    callbacks: Callable[[], list[Any]] = list
    trainer: dict[str, Any] = field(default_factory=dict)
    package: Any = pl

    def start(
        self, run: Path | str, *, every: str = "1000 steps", seed: int = 7, kill: int | None = None, **keyword: Any
    ) -> Outcome:
        """`seed` differs between starts in the tests: nothing may depend on what the script draws by itself."""
        package = self.package
        fits._returned.clear()  # a start is a new process
        package.seed_everything(seed, verbose=False)
        module, rows = self.module(), Rows() if package is pl else False
        spot = SpotCallback(run, every, sources="none", writer="thread")
        callbacks = [*self.callbacks(), spot]
        if kill is not None:
            callbacks.append(KillAfterSave(kill, spot))
        options = {"max_epochs": 2, **self.trainer}
        trainer = package.Trainer(
            accelerator="cpu",
            devices=1,
            enable_progress_bar=False,
            enable_model_summary=False,
            callbacks=callbacks,
            logger=rows,
            log_every_n_steps=1,
            limit_val_batches=1.0 if self.validation else 0,
            **{"enable_checkpointing": False, **options},
        )
        killed = False
        val = DataLoader(Samples(8), batch_size=BATCH) if self.validation else None
        try:
            trainer.fit(module, self.loader(), val, **keyword)
        except Killed:
            killed = True
        return Outcome(module, trainer, rows.rows if rows else [], killed)


def assert_same_state(got: Outcome, want: Outcome) -> None:
    """Weights, buffers, optimizer, scheduler and progress, bit for bit."""
    assert_equal(got.state, want.state, "state")


def assert_equal(got: Any, want: Any, where: str) -> None:
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), where
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), f"{where}: {got} is not {want}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_equal(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {got} is not {want}"
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_equal(a, b, f"{where}[{number}]")
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"


def assert_continues(
    job: Job, tmp_path: Path, kills: list[int], *, every: str | None = None
) -> tuple[Outcome, list[Outcome]]:
    """Kill after the generation of each step in `kills`, restart, and compare the whole with the control."""
    control = job.start(tmp_path / "control")
    lives = [
        job.start(tmp_path / "run", every=every or f"{step} steps", seed=100 + number, kill=step)
        if number
        else job.start(tmp_path / "run", every=every or f"{step} steps", kill=step)
        for number, step in enumerate(kills)
    ]
    assert [life.killed for life in lives] == [True] * len(lives)
    lives.append(job.start(tmp_path / "run", seed=99))
    assert not lives[-1].killed
    for name in ("ids", "losses", "events"):
        got = [item for life in lives for item in getattr(life.module, name)]
        assert_equal(got, getattr(control.module, name), name)
    assert_equal([row for life in lives for row in life.rows], control.rows, "logged rows")
    assert_same_state(lives[-1], control)
    return control, lives
