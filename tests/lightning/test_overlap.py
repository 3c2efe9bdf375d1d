"""Staging overlaps the next forward and backward, and is over before anything changes a parameter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot import SpotCallback
from lightning_spot.capture import stable_tensors
from spot_core.pytorch import fits
from spot_core.pytorch.session import Session

from ._harness import SILENT, Net, plain
from ._models import Manual


def events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, **options: Any) -> list[str]:
    """What happened in three steps, each of which is saved."""
    fits._returned.clear()
    happened: list[str] = options.pop("happened", [])
    save, wait_staged = Session.save, Session.wait_staged

    def watched_save(self: Session, step: int, **keyword: Any) -> None:
        stable = list(keyword["stable"])
        happened.append("save" if stable else "save at once")
        save(self, step, **{**keyword, "stable": stable})

    def watched_wait(self: Session) -> None:
        happened.append("wait")
        wait_staged(self)

    monkeypatch.setattr(Session, "save", watched_save)
    monkeypatch.setattr(Session, "wait_staged", watched_wait)

    class Watch(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            for optimizer in trainer.optimizers:
                optimizer.register_step_post_hook(lambda *_: happened.append("step"))

        def on_train_batch_start(self, *args: Any) -> None:
            happened.append("batch")

    spot = SpotCallback(tmp_path / "run", "1 steps", sources="none", writer="thread")
    trainer = pl.Trainer(max_steps=-1, max_epochs=1, limit_train_batches=3, limit_val_batches=0,
                         callbacks=[Watch(), *options.pop("callbacks", ()), spot], **SILENT)  # fmt: skip
    trainer.fit(module, plain())
    return happened


def changes_while_staging(happened: list[str]) -> list[int]:
    """Places at which an optimizer stepped although no wait came between the last save and it."""
    staging, wrong = False, []
    for number, event in enumerate(happened):
        if event == "save":
            staging = True
        elif event == "wait":
            staging = False
        elif event == "step" and staging:
            wrong.append(number)
    return wrong


def test_waits_before_the_optimizer_and_not_earlier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = events(tmp_path, monkeypatch, Net())
    assert happened.count("save") >= 2
    assert changes_while_staging(happened) == []
    first = happened.index("save")
    assert happened[first : first + 3] == ["save", "batch", "wait"]  # the batch begins while tensors are being copied


class Noise(pl.Callback):
    """Changes weights just before the optimizer does."""

    def __init__(self, happened: list[str]) -> None:
        self.happened = happened

    def on_before_optimizer_step(self, *args: Any) -> None:
        self.happened.append("step")


def test_waits_before_other_callbacks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[str] = []
    events(tmp_path, monkeypatch, Net(), callbacks=[Noise(happened)], happened=happened)
    assert happened.count("save") >= 2
    assert changes_while_staging(happened) == []


@pytest.mark.parametrize("raw", [False, True])
def test_manual_optimization_waits_too(raw: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    happened = events(tmp_path, monkeypatch, Manual(raw=raw))
    assert happened.count("save") >= 2
    assert changes_while_staging(happened) == []


class Starts(Net):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        pass


def test_a_hook_that_may_change_weights_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "save" not in events(tmp_path, monkeypatch, Starts())


def test_callbacks_that_exchange_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pruning = pl.callbacks.ModelPruning("l1_unstructured", amount=0.1)
    assert "save" not in events(tmp_path, monkeypatch, Net(), callbacks=[pruning])


def test_what_is_stable(tmp_path: Path) -> None:
    trainer = pl.Trainer(max_epochs=1, limit_train_batches=2, limit_val_batches=0, **SILENT)
    module = Net()
    trainer.fit(module, plain())
    states = [optimizer.state_dict() for optimizer in trainer.optimizers]
    found = {tensor.data_ptr() for tensor in stable_tensors(trainer)}
    assert found >= {parameter.data_ptr() for parameter in module.parameters()}
    assert {value.data_ptr() for value in states[0]["state"][0].values()} <= found
    assert not found & {buffer.data_ptr() for buffer in module.buffers()}
