"""Lightning's own checkpoints through the engine: nothing is deleted early, lost silently, or torn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch

from lightning_spot import SpotCheckpointIO
from spot_core.errors import RestoreError, SpotError, StoreError
from spot_core.store import LocalStore

from ._harness import SILENT, Net, assert_equal, plain


def checkpoint(value: float, step: int = 1) -> dict[str, Any]:
    return {"state_dict": {"w": torch.full((1000,), value)}, "global_step": step, "epoch": 0, "rates": [0.1, (2, None)]}


def test_written_is_read(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.5), tmp_path / "a.ckpt")
    assert_equal(plugin.load_checkpoint(tmp_path / "a.ckpt"), checkpoint(1.5), "checkpoint")
    plugin.teardown()


def test_a_tensor_changed_after_the_call_does_not_reach_the_file(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    state = checkpoint(1.5)
    plugin.save_checkpoint(state, tmp_path / "a.ckpt")
    state["state_dict"]["w"].zero_()
    state["rates"].append("late")
    assert_equal(plugin.load_checkpoint(tmp_path / "a.ckpt"), checkpoint(1.5), "checkpoint")


def test_the_same_path_is_replaced_as_a_whole(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    for step in (1, 2, 2, 1):
        plugin.save_checkpoint(checkpoint(float(step), step), tmp_path / "last.ckpt")
        assert_equal(plugin.load_checkpoint(tmp_path / "last.ckpt"), checkpoint(float(step), step), "checkpoint")
    assert len(list((tmp_path / "last.ckpt" / "generations").iterdir())) <= 2


def test_a_file_is_removed_only_after_its_successor_is_durable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of ModelCheckpoint(save_top_k=1): save the new one, remove the old one, die."""
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "one.ckpt")
    plugin.save_checkpoint(checkpoint(2.0), tmp_path / "two.ckpt")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    assert (tmp_path / "one.ckpt").exists()
    plugin.flush()
    assert not (tmp_path / "one.ckpt").exists()
    assert_equal(plugin.load_checkpoint(tmp_path / "two.ckpt"), checkpoint(2.0), "checkpoint")


def test_a_failed_save_is_raised_and_nothing_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "one.ckpt")
    plugin.flush()

    def full(self: Any, key: str, source: Any) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(LocalStore, "put_blob", full)
    plugin.save_checkpoint(checkpoint(2.0), tmp_path / "two.ckpt")
    plugin.remove_checkpoint(tmp_path / "one.ckpt")
    with pytest.raises(SpotError, match="no space left"):
        plugin.flush()
    monkeypatch.undo()
    plugin.flush()
    assert_equal(plugin.load_checkpoint(tmp_path / "one.ckpt"), checkpoint(1.0), "checkpoint")
    with pytest.raises(SpotError):
        plugin.load_checkpoint(tmp_path / "two.ckpt")


def test_temporary_files_are_there_at_once(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / ".lr_find_x.ckpt")
    assert_equal(SpotCheckpointIO().load_checkpoint(tmp_path / ".lr_find_x.ckpt"), checkpoint(1.0), "checkpoint")


def test_damage_is_noticed(tmp_path: Path) -> None:
    plugin = SpotCheckpointIO()
    plugin.save_checkpoint(checkpoint(1.0), tmp_path / "a.ckpt")
    plugin.flush()
    (blob,) = (tmp_path / "a.ckpt").rglob("*.blob")
    data = bytearray(blob.read_bytes())
    data[100] ^= 1
    blob.write_bytes(bytes(data))
    with pytest.raises(RestoreError):
        plugin.load_checkpoint(tmp_path / "a.ckpt")


def test_files_of_lightning_are_read_too(tmp_path: Path) -> None:
    torch.save(checkpoint(3.0), tmp_path / "plain.ckpt")
    assert_equal(SpotCheckpointIO().load_checkpoint(tmp_path / "plain.ckpt"), checkpoint(3.0), "checkpoint")


def test_in_a_trainer_with_top_k(tmp_path: Path) -> None:
    """ModelCheckpoint keeps its two best, and the fit resumes from the last one as from Lightning's own file."""
    options = {**SILENT, "enable_checkpointing": True}

    def trainer(folder: str, plugins: list[Any], epochs: int) -> Any:
        files = pl.callbacks.ModelCheckpoint(tmp_path / folder, monitor="loss", save_top_k=2, save_last=True)
        return pl.Trainer(max_epochs=epochs, limit_val_batches=0, callbacks=[files], plugins=plugins, **options)

    results = []
    for folder, plugins in (("spot", lambda: [SpotCheckpointIO()]), ("stock", list)):
        pl.seed_everything(3, verbose=False)
        trainer(folder, plugins(), 3).fit(Net(), plain(shuffle=False))
        pl.seed_everything(4, verbose=False)
        module = Net()
        resumed = trainer(folder, plugins(), 4)
        resumed.fit(module, plain(shuffle=False), ckpt_path=str(tmp_path / folder / "last.ckpt"))
        files = sorted(path.name for path in (tmp_path / folder).iterdir())
        results.append((resumed.global_step, files, module.state_dict()))
    (spot_step, spot_files, spot_state), (step, files, state) = results
    assert spot_step == step == 32
    assert len(spot_files) == len(files)
    assert_equal(dict(spot_state), dict(state), "weights")
