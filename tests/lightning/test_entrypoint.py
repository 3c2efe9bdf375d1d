"""The ways to switch it on: the variable alone, LightningCLI YAML, keywords, both packages of Lightning."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot import SpotCallback, trainer_kwargs
from lightning_spot.entrypoint import callbacks
from spot_core.pytorch import fits
from spot_core.run import Run

from ._harness import SILENT, Job, Net, assert_equal, plain


def spots(trainer: Any) -> list[SpotCallback]:
    return [callback for callback in trainer.callbacks if isinstance(callback, SpotCallback)]


def test_without_the_variable_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    assert callbacks() == []
    monkeypatch.setenv("SPOT_RUN", "  ")
    assert callbacks() == []
    assert spots(pl.Trainer(**SILENT)) == []


def test_the_variable_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An untouched script: SPOT_RUN, and SPOT_INTERVAL for the interval."""
    monkeypatch.setenv("SPOT_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("SPOT_INTERVAL", "3 steps")
    monkeypatch.setenv("SPOT_WRITER", "thread")
    fits._returned.clear()
    trainer = pl.Trainer(max_epochs=1, limit_val_batches=0, **SILENT)
    assert len(spots(trainer)) == 1
    trainer.fit(Net(), plain())
    steps = [committed.id.step for committed in Run.open(tmp_path / "run").discover().generations]
    assert steps[0] == 8
    assert set(steps) <= {3, 6, 8}


def test_two_instances_act_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configured in the script and by the variable: the script's one acts, with its run and its interval."""
    monkeypatch.setenv("SPOT_RUN", str(tmp_path / "other"))
    fits._returned.clear()
    own = SpotCallback(tmp_path / "run", "2 steps", sources="none", writer="thread")
    trainer = pl.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[own], **SILENT)
    assert len(spots(trainer)) == 2
    trainer.fit(Net(), plain())
    assert (tmp_path / "run" / "spot.json").exists()
    assert not (tmp_path / "other").exists()


def test_trainer_kwargs(tmp_path: Path) -> None:
    keywords = trainer_kwargs(tmp_path / "run", interval="3 steps", keep=2, checkpoint_io=True)
    trainer = pl.Trainer(**keywords, **SILENT)
    (spot,) = spots(trainer)
    assert (spot.settings.interval, spot.settings.keep) == ("3 steps", 2)
    assert type(trainer.strategy.checkpoint_io).__name__ == "SpotCheckpointIO"
    with pytest.raises(TypeError, match="colour"):
        trainer_kwargs(tmp_path / "run", colour="red")


CLI = """
import sys
sys.path.insert(0, {root!r})
import torch
from lightning.pytorch.cli import LightningCLI
from torch.utils.data import DataLoader
from tests.lightning._harness import Net, Samples
import lightning.pytorch as pl

class Data(pl.LightningDataModule):
    def __init__(self, batch_size: int = 4):
        super().__init__()
        self.batch_size = batch_size
    def train_dataloader(self):
        return DataLoader(Samples(), batch_size=self.batch_size, shuffle=True)

cli = LightningCLI(Net, Data, save_config_callback=None, seed_everything_default=3)
torch.save([cli.model.ids, cli.model.state_dict()], {out!r})
"""

YAML = """
trainer:
  max_epochs: {epochs}
  accelerator: cpu
  devices: 1
  logger: false
  enable_progress_bar: false
  enable_model_summary: false
  enable_checkpointing: false
  callbacks:
    - class_path: lightning_spot.SpotCallback
      init_args:
        run: {run}
        interval: 3 steps
        keep: 2
        sources: none
        storage_options: null
"""


def test_lightning_cli_yaml(tmp_path: Path) -> None:
    root = str(Path(__file__).parents[2])
    (tmp_path / "config.yaml").write_text(YAML.format(run=tmp_path / "run", epochs=1))
    (tmp_path / "cli.py").write_text(CLI.format(root=root, out=str(tmp_path / "out.pt")))
    command = [sys.executable, str(tmp_path / "cli.py"), "fit", "--config", str(tmp_path / "config.yaml")]
    for _ in range(2):
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False)
        assert done.returncode == 0, done.stderr[-2000:]
    committed = Run.open(tmp_path / "run").discover().generations[0]
    assert committed.manifest.finished
    assert committed.id.step == 8
    import torch

    ids, _ = torch.load(tmp_path / "out.pt", weights_only=True)
    assert ids == []  # the second start found the run finished


def twin() -> Any:
    return pytest.importorskip("pytorch_lightning")


TWIN = """
import sys
sys.path.insert(0, {root!r})
import logging, warnings
warnings.filterwarnings("ignore")
import torch
import pytorch_lightning as pl
from torch.utils.data import DataLoader, Dataset
from lightning_spot import SpotCallback, SpotCheckpointIO
assert "lightning.pytorch" not in sys.modules, "the twin must be enough"
torch.set_num_threads(1)

class Data(Dataset):
    def __len__(self): return 32
    def __getitem__(self, i): return torch.arange(4.0) * 0.1 + i / 10, i

class Net(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Dropout(0.5), torch.nn.Linear(8, 1))
        self.ids = []
    def training_step(self, batch, batch_idx):
        self.ids.append(batch[1].tolist())
        loss = self.net(batch[0]).square().mean()
        self.log("loss", loss, on_epoch=True)
        return loss
    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.05)

class Die(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == int({kill!r}) and spot._fit._saved_step >= 0:
            spot._fit._session.drain()
            torch.save(module.ids, {out!r} + ".first")
            import os
            os._exit(9)

pl.seed_everything(3, verbose=False)
spot = SpotCallback({run!r}, "5 steps", sources="none", writer="thread")
assert isinstance(spot, pl.Callback)
trainer = pl.Trainer(max_epochs=2, accelerator="cpu", devices=1, logger=False, enable_progress_bar=False,
    enable_model_summary=False, enable_checkpointing=False, callbacks=[spot, Die()], plugins=[SpotCheckpointIO()])
module = Net()
trainer.fit(module, DataLoader(Data(), batch_size=4, shuffle=True))
trainer.save_checkpoint({out!r} + ".ckpt", weights_only=False)
torch.save([module.ids, dict(module.state_dict())], {out!r})
"""


def test_the_twin_package(tmp_path: Path) -> None:
    """`pytorch_lightning` alone, with `lightning` never imported: interrupted and resumed exactly."""
    twin()
    root = str(Path(__file__).parents[2])
    import torch

    def start(run: str, out: str, kill: int) -> subprocess.CompletedProcess[str]:
        script = tmp_path / "twin.py"
        script.write_text(TWIN.format(root=root, run=str(tmp_path / run), out=str(tmp_path / out), kill=str(kill)))
        return subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, timeout=240, check=False,
            cwd=tmp_path, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        )  # fmt: skip

    control = start("control", "control.pt", -1)
    assert control.returncode == 0, control.stderr[-2000:]
    assert start("run", "run.pt", 7).returncode == 9
    second = start("run", "run.pt", -1)
    assert second.returncode == 0, second.stderr[-2000:]
    ids, weights = torch.load(tmp_path / "control.pt", weights_only=True)
    first = torch.load(tmp_path / "run.pt.first", weights_only=True)
    rest, resumed = torch.load(tmp_path / "run.pt", weights_only=True)
    assert first[:5] + rest == ids
    assert_equal(resumed, weights, "weights")


def test_the_callback_of_one_package_in_the_trainer_of_the_other(tmp_path: Path) -> None:
    package = twin()

    class TwinNet(package.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = Net()
            self.ids, self.losses, self.events = self.inner.ids, self.inner.losses, self.inner.events

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = self.inner.loss(batch)
            self.losses.append(float(loss))
            return loss

        def configure_optimizers(self) -> Any:
            import torch

            return torch.optim.Adam(self.parameters(), lr=0.05)

    job = Job(module=TwinNet, package=package)
    control = job.start(tmp_path / "control")
    life = job.start(tmp_path / "run", every="5 steps", kill=5)
    rest = job.start(tmp_path / "run", seed=99)
    assert life.killed
    assert life.module.ids + rest.module.ids == control.module.ids
    assert_equal(rest.state, control.state, "state")
