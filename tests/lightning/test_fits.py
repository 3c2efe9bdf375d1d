"""Several fits in a script, fits that had finished, and everything that is not a fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.tuner import Tuner
from torch.utils.data import DataLoader

from lightning_spot import SpotCallback
from spot_core.pytorch import fits
from spot_core.run import Run

from ._harness import BATCH, SILENT, Job, KillAfterSave, Killed, Samples, assert_equal, assert_same_state, plain
from ._models import Searching


def folds(run: Path, *, kill_in: int | None = None, at: int = 3, seed: int = 7) -> list[Any]:
    """A script with three fits; it dies in fit `kill_in` after the generation of step `at`."""
    fits._returned.clear()
    pl.seed_everything(seed, verbose=False)
    made = []
    for number in range(3):
        torch.manual_seed(number)
        module = Searching()
        spot = SpotCallback(run, "1 steps", sources="none", writer="thread")
        callbacks: list[Any] = [spot]
        if number == kill_in:
            callbacks.append(KillAfterSave(at, spot))
        trainer = pl.Trainer(max_epochs=1, limit_val_batches=0, callbacks=callbacks, **SILENT)
        made.append((module, trainer))
        trainer.fit(module, plain())
    return made


def test_each_fit_of_a_script_has_its_own_state(tmp_path: Path) -> None:
    control = folds(tmp_path / "control")
    with pytest.raises(Killed):
        folds(tmp_path / "run", kill_in=1)
    resumed = folds(tmp_path / "run", seed=99)
    assert [len(module.ids) for module, _ in control] == [8, 8, 8]
    assert [len(module.ids) for module, _ in resumed] == [0, 5, 8]
    for (module, _), (wanted, _) in zip(resumed, control, strict=True):
        assert_equal(dict(module.state_dict()), dict(wanted.state_dict()), "weights")
    names = [Run.open(tmp_path / "run" / part).discover().generations[0] for part in ("", "fit-0001", "fit-0002")]
    assert all(committed.manifest.finished for committed in names)


def test_a_finished_fit_returns_at_once(tmp_path: Path) -> None:
    job = Job(validation=True)
    first = job.start(tmp_path / "run")
    before = sorted(path.name for path in (tmp_path / "run").rglob("*"))
    again = job.start(tmp_path / "run", seed=99)
    assert again.module.ids == []
    assert again.module.events == []
    assert_same_state(again, first)
    assert sorted(path.name for path in (tmp_path / "run").rglob("*")) == before


def test_a_finished_fit_stopped_early_stays_stopped(tmp_path: Path) -> None:
    job = Job(
        validation=True,
        callbacks=lambda: [pl.callbacks.EarlyStopping("val", patience=0, min_delta=100.0)],
        trainer={"max_epochs": 9},
    )
    first = job.start(tmp_path / "run")
    assert 0 < len(first.module.ids) < 9 * 8
    again = job.start(tmp_path / "run", seed=99)
    assert again.module.ids == []
    assert_same_state(again, first)


def test_a_finished_fit_can_be_trained_longer(tmp_path: Path) -> None:
    Job().start(tmp_path / "run")
    longer = Job(trainer={"max_epochs": 3}).start(tmp_path / "run", seed=99)
    control = Job(trainer={"max_epochs": 3}).start(tmp_path / "control")
    assert longer.module.ids == control.module.ids[16:]
    assert longer.trainer.global_step == 24


def test_an_interrupted_fit_is_taken_up_in_the_same_process(tmp_path: Path) -> None:
    """A notebook: fit fails or is interrupted, and the same cell runs again."""
    control = Job().start(tmp_path / "control")
    spot = SpotCallback(tmp_path / "run", "1 steps", sources="none", writer="thread")
    fits._returned.clear()
    pl.seed_everything(7, verbose=False)
    lives = []
    for callbacks in ([spot, KillAfterSave(5, spot)], [spot]):
        module = Job().module()
        trainer = pl.Trainer(max_epochs=2, limit_val_batches=0, callbacks=callbacks, **SILENT)
        lives.append(module)
        try:
            trainer.fit(module, plain())
        except Killed:
            assert len(module.ids) >= 5
    assert lives[1].ids == control.module.ids[-len(lives[1].ids) :]
    assert_equal(dict(lives[1].state_dict()), dict(control.module.state_dict()), "weights")


def test_the_newest_generation_beats_the_given_checkpoint(tmp_path: Path) -> None:
    """A restarted, unchanged command must not go back to the checkpoint it started from."""
    start = pl.Trainer(max_steps=2, limit_val_batches=0, **SILENT)
    pl.seed_everything(1, verbose=False)
    start.fit(Job().module(), plain())
    start.save_checkpoint(tmp_path / "init.ckpt", weights_only=False)
    job = Job(trainer={"max_epochs": 3})
    given = {"ckpt_path": str(tmp_path / "init.ckpt")}
    control = job.start(tmp_path / "control", **given)
    life = job.start(tmp_path / "run", every="9 steps", kill=9, **given)
    last = job.start(tmp_path / "run", seed=99, **given)
    assert life.killed
    assert last.module.ids[0] != control.module.ids[0]
    assert life.module.ids[: len(control.module.ids) - len(last.module.ids)] + last.module.ids == control.module.ids
    assert_same_state(last, control)


def test_only_fit_is_touched(tmp_path: Path) -> None:
    """validate, test and predict before and after a fit use the module as it is, and the run is not looked at."""
    run = tmp_path / "run"
    spot = SpotCallback(run, "4 steps", sources="none", writer="thread")
    trainer = pl.Trainer(max_epochs=1, callbacks=[spot], **SILENT)
    module = Job().module()
    val = DataLoader(Samples(8), batch_size=BATCH)
    trainer.validate(module, val, verbose=False)
    assert not run.exists()
    trainer.fit(module, plain(), val)
    after = {name: value.clone() for name, value in module.state_dict().items()}
    found = sorted(run.rglob("*"))
    (result,) = trainer.validate(module, val, verbose=False)
    assert set(result) == {"val"}
    assert_equal(dict(module.state_dict()), after, "weights")
    assert sorted(run.rglob("*")) == found


def test_a_dry_run_writes_nothing(tmp_path: Path) -> None:
    spot = SpotCallback(tmp_path / "run", "1 steps", sources="none")
    trainer = pl.Trainer(fast_dev_run=2, callbacks=[spot], **SILENT)
    trainer.fit(Job().module(), plain())
    assert not (tmp_path / "run").exists()


def test_the_tuner_is_no_fit(tmp_path: Path) -> None:
    """`Tuner.lr_find` tries and leaves, also on a restart; the fit after it is the run's first."""

    def start(kill: int | None, seed: int) -> Any:
        fits._returned.clear()
        pl.seed_everything(seed, verbose=False)
        spot = SpotCallback(tmp_path / "run", "3 steps", sources="none", writer="thread")
        callbacks: list[Any] = [spot] if kill is None else [spot, KillAfterSave(kill, spot)]
        options = SILENT | {"enable_progress_bar": False}
        trainer = pl.Trainer(
            max_epochs=1, limit_val_batches=0, callbacks=callbacks, default_root_dir=tmp_path, **options
        )
        module = Searching()
        Tuner(trainer).lr_find(module, plain(), num_training=4)
        module.ids.clear()
        try:
            trainer.fit(module, plain())
        except Killed:
            assert kill is not None
        return module

    first, second = start(3, 7), start(None, 9)
    assert len(first.ids) == 3
    assert len(second.ids) == 5
    assert not (tmp_path / "run" / "fit-0001").exists()


def test_nothing_is_left_on_the_trainer(tmp_path: Path) -> None:
    """Methods replaced for the fit are Lightning's own again afterwards, and after an error."""
    for kill in (None, 3):
        outcome = Job(trainer={"max_epochs": 1}).start(tmp_path / str(kill), every="3 steps", kill=kill)
        trainer = outcome.trainer
        owners = [trainer.strategy, trainer._checkpoint_connector, trainer._logger_connector, trainer._signal_connector]
        owners.append(trainer.fit_loop.epoch_loop)
        ours = [name for owner in owners for name, value in vars(owner).items() if "Fit." in repr(value)]
        assert ours == []
