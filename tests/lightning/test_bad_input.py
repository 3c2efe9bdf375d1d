"""Mistakes get a clear error before anything is trained, and nothing that lies in the folder is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot import ResumableDataModule, SpotCallback, SpotCheckpointIO, _compat
from spot_core.errors import ConfigError, ResumeMismatchError
from spot_core.pytorch import fits

from ._harness import SILENT, Job, Net, plain


def fit(spot: SpotCallback, module: Any = None, callbacks: tuple[Any, ...] = (), **options: Any) -> Any:
    fits._returned.clear()
    module = Net() if module is None else module
    trainer = pl.Trainer(
        max_epochs=1, limit_val_batches=0, callbacks=[spot, *callbacks], **{**SILENT, **options}
    )
    trainer.fit(module, plain())
    return module


@pytest.mark.parametrize("run", ["", "   ", "nosuchscheme://bucket/run"])
def test_a_run_that_is_no_location(run: str, tmp_path: Path) -> None:
    module = Net()
    with pytest.raises(ConfigError):
        fit(SpotCallback(run), module)
    assert module.ids == []


def test_no_run_at_all() -> None:
    with pytest.raises(ConfigError, match="SPOT_RUN"):
        fit(SpotCallback())


@pytest.mark.parametrize(
    "settings",
    [
        {"interval": "0 steps"},
        {"interval": "0s"},
        {"interval": "soon"},
        {"keep": 0},
        {"keep": -1},
        {"exit_code": 0},
        {"exit_code": 1},
        {"sources": "carrier-pigeon"},
        {"window_s": 60.0, "grace_s": 30.0},
        {"writer": "fax"},
    ],
)
def test_settings_that_cannot_be(settings: dict[str, Any], tmp_path: Path) -> None:
    module = Net()
    with pytest.raises(ConfigError):
        fit(SpotCallback(tmp_path / "run", **settings), module)
    assert module.ids == []
    assert not (tmp_path / "run").exists()


class Wider(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = pl.LightningModule()
        self.register_buffer("extra", __import__("torch").zeros(3))


def test_the_run_of_another_model(tmp_path: Path) -> None:
    fit(SpotCallback(tmp_path / "run", "3 steps", sources="none", writer="thread"))
    before = sorted(tmp_path.rglob("*"))
    module = Wider()
    with pytest.raises(ResumeMismatchError, match="another model"):
        fit(SpotCallback(tmp_path / "run", "3 steps", sources="none", writer="thread"), module)
    assert module.ids == []
    assert sorted(tmp_path.rglob("*")) == before


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "epoch=1.ckpt").write_bytes(b"somebody's")
    module = Net()
    with pytest.raises(ConfigError, match=r"epoch=1\.ckpt"):
        fit(SpotCallback(tmp_path / "run", "3 steps", sources="none", writer="thread"), module)
    assert module.ids == []
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["epoch=1.ckpt"]


@pytest.mark.parametrize("inside", ["", "best"])
def test_model_checkpoints_inside_the_run(inside: str, tmp_path: Path) -> None:
    files = pl.callbacks.ModelCheckpoint(tmp_path / "run" / inside)
    module = Net()
    with pytest.raises(ConfigError, match="ModelCheckpoint"):
        fit(SpotCallback(tmp_path / "run", sources="none"), module, (files,), enable_checkpointing=True)
    assert module.ids == []


class Fetches(Net):
    def training_step(self, dataloader_iter: Any) -> Any:
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


def test_a_step_that_fetches_for_itself(tmp_path: Path) -> None:
    module = Fetches()
    with pytest.raises(ConfigError, match="dataloader_iter"):
        fit(SpotCallback(tmp_path / "run", sources="none", writer="thread"), module)
    assert module.ids == []


class Sharding:
    restore_checkpoint_after_setup = True


def test_strategies_that_bypass_the_plugin() -> None:
    with pytest.raises(ConfigError, match="Sharding"):
        SpotCheckpointIO.check_strategy(Sharding())


@pytest.mark.parametrize("version", ["2.4.0", "2.7.0", "3.0.1", "1.9.5"])
def test_other_versions_of_lightning(version: str) -> None:
    with pytest.raises(ConfigError, match=version):
        _compat.check_version("lightning.pytorch", version)


@pytest.mark.parametrize("version", ["2.5.0", "2.5.6", "2.6.0", "2.6.6", "2.6.0rc1", "2.5.0.post0"])
def test_supported_versions_of_lightning(version: str) -> None:
    _compat.check_version("lightning.pytorch", version)


class Endless(ResumableDataModule):
    def train_dataset(self) -> Any:
        return iter(range(3))


def test_a_data_set_without_an_index(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="map-style"):
        Endless().train_dataloader()
    with pytest.raises(ConfigError, match="batch_size"):
        ResumableDataModule(batch_size=0)


def test_a_second_run_continues_in_the_same_folder_only_with_the_same_model(tmp_path: Path) -> None:
    """The counterpart of the refusals: the right model is taken."""
    first = Job(trainer={"max_epochs": 1}).start(tmp_path / "run")
    again = Job(trainer={"max_epochs": 1}).start(tmp_path / "run")
    assert len(first.module.ids) == 8
    assert again.module.ids == []
