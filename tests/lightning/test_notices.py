"""What a notice, an error or Ctrl-C does to a fit in one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest

from lightning_spot import SpotCallback
from spot_core.errors import SpotError, StoreError
from spot_core.pytorch import fits
from spot_core.run import Run
from spot_core.store import LocalStore

from ._harness import SILENT, Job, Net, assert_equal, assert_same_state, plain


class At(pl.Callback):
    """Does something once, at the start of batch `step`."""

    def __init__(self, step: int, what: Any) -> None:
        self.step, self.what = step, what

    def on_train_batch_start(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == self.step and self.what is not None:
            what, self.what = self.what, None
            what()


def fit(
    run: Path, *callbacks: Any, make: Any = Net, made: list[Any] | None = None, seed: int = 7, **settings: Any
) -> Any:
    """`made` gets the module, also when the fit does not return."""
    fits._returned.clear()
    pl.seed_everything(seed, verbose=False)
    module = make()
    if made is not None:
        made.append(module)
    options = {"interval": "1000 steps", "sources": "signals", "writer": "thread", **settings}
    spot = SpotCallback(run, **options)
    trainer = pl.Trainer(max_epochs=2, limit_val_batches=0, callbacks=[*callbacks, spot], **SILENT)
    trainer.fit(module, plain())
    return trainer


def term() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


class Slow(Net):
    """Slow enough for a notice to be noticed before the fit is over."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        import threading

        threading.Event().wait(0.1)
        return super().training_step(batch, batch_idx)


def test_sigterm_saves_and_leaves_with_its_code(tmp_path: Path) -> None:
    control = Job().start(tmp_path / "control")
    before = signal.getsignal(signal.SIGTERM)
    made: list[Any] = []
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path / "run", At(3, term), make=Slow, made=made)
    assert stopped.value.code == 143
    assert signal.getsignal(signal.SIGTERM) == before
    step = Run.open(tmp_path / "run").discover().generations[0].id.step
    fit(tmp_path / "run", made=made, seed=9)
    first, second = made
    assert 4 <= step == len(first.ids) < 16
    assert first.ids + second.ids == control.module.ids
    assert_equal(dict(second.state_dict()), dict(control.module.state_dict()), "weights")


def test_another_exit_code(tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as stopped:
        fit(tmp_path / "run", At(2, term), make=Slow, exit_code=77)
    assert stopped.value.code == 77


def test_ctrl_c_is_lightnings(tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with pytest.raises(SystemExit) as left:
        fit(tmp_path / "run", At(5, interrupt), interval="2 steps")
    assert left.value.code == 1
    signal.signal(signal.SIGINT, signal.default_int_handler)
    assert Run.open(tmp_path / "run").discover().generations[0].id.step in (2, 4)


def broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def put_blob(self: Any, key: str, source: Any) -> None:
        raise StoreError("no space left on device")

    monkeypatch.setattr(LocalStore, "put_blob", put_blob)


def test_a_failed_save_is_raised_when_asked_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    breaks = At(2, lambda: broken(monkeypatch))
    with pytest.raises(SpotError, match="no space left"):
        fit(tmp_path / "run", breaks, made=made, interval="3 steps", on_save_error="raise")
    assert len(made[0].ids) < 16


def test_failed_saves_are_borne_for_a_while(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With "warn" training goes on; when the store is back, so are the generations."""
    control = Job().start(tmp_path / "control")
    trainer = fit(
        tmp_path / "run",
        At(2, lambda: broken(monkeypatch)),
        At(9, monkeypatch.undo),
        interval="3 steps",
        max_failed_saves=9,
    )
    assert trainer.global_step == 16
    assert_equal(dict(trainer.lightning_module.state_dict()), dict(control.module.state_dict()), "weights")
    generations = Run.open(tmp_path / "run").discover().generations
    assert generations[0].manifest.finished
    again = Job().start(tmp_path / "run", seed=9)
    assert again.module.ids == []
    assert_same_state(again, control)
