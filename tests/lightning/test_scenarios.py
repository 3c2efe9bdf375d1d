"""What users do with Lightning, each interrupted and compared bit for bit with the uninterrupted control."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.utilities import CombinedLoader
from torch.utils.data import DataLoader

from spot_core.errors import ResumeMismatchError

from ._harness import Job, Samples, assert_continues, assert_equal, plain, stateful, stateful_stream, stream
from ._models import (
    Averaged,
    Manual,
    OneCycle,
    Plateau,
    Searching,
    Sizing,
    TargetNetwork,
    Two,
    Unfreeze,
    WithHyperparameters,
)

cb = pl.callbacks


def several(mode: str, first: Callable[[], Any] = plain, short: int = 12) -> Callable[[], Any]:
    def make() -> CombinedLoader:
        second = DataLoader(Samples(short), batch_size=4, shuffle=True)
        return CombinedLoader({"a": first(), "b": second}, mode)

    return make


def averaging() -> list[Any]:
    if not hasattr(cb, "EMAWeightAveraging"):
        pytest.skip("this version of Lightning has no weight averaging")
    return [cb.EMAWeightAveraging(decay=0.5)]


def impatient() -> list[Any]:
    return [cb.EarlyStopping("val", patience=1, min_delta=10.0)]


# name: (job, steps after which it is interrupted in the fast lane, further steps in the slow lane)
SCENARIOS: dict[str, tuple[Job, tuple[int, ...], tuple[int, ...]]] = {
    "augmentation": (Job(loader=lambda: plain(augment=True)), (3,), (7, 8, 9)),
    "augmentation in workers": (Job(loader=lambda: plain(2, augment=True)), (9,), (3, 8)),
    "augmentation in kept workers": (
        Job(loader=lambda: plain(2, augment=True, persistent_workers=True)), (9,), (3, 8),
    ),
    "augmentation, stateful loader": (Job(loader=lambda: stateful(augment=True)), (9,), (3, 8)),
    "iterable": (Job(loader=stream, validation=True), (8,), (3, 9)),
    "iterable, workers": (Job(loader=lambda: stream(2)), (3,), (8, 9)),
    "stateful iterable": (Job(loader=stateful_stream, validation=True), (3,), (8, 9)),
    "stateful iterable, workers": (Job(loader=lambda: stateful_stream(2)), (9,), (3, 8)),
    "accumulation 3": (Job(trainer={"accumulate_grad_batches": 3}), (2, 3), (1, 4, 5)),
    "accumulation 4, validation": (Job(trainer={"accumulate_grad_batches": 4}, validation=True), (2,), (1, 3)),
    "manual optimization": (Job(module=Manual), (5,), (3, 8, 9)),
    "manual, raw optimizers": (Job(module=lambda: Manual(raw=True)), (5,), (3, 8, 9)),
    "manual, gradients kept": (Job(module=lambda: Manual(3)), (4,), (3, 5, 8, 9)),
    "one cycle": (Job(module=OneCycle), (3,), (8, 9)),
    "one cycle, stateful loader": (Job(module=OneCycle, loader=stateful), (3,), (8, 9)),
    "plateau by epoch": (Job(module=Plateau, trainer={"max_epochs": 3}), (5, 8), (9, 16)),
    "plateau by step": (Job(module=lambda: Plateau("step", "loss")), (5,), (8, 9)),
    "plateau by validation": (
        Job(module=lambda: Plateau("epoch", "val"), validation=True, trainer={"max_epochs": 3}), (8,), (5, 9, 16),
    ),
    "target network": (Job(module=TargetNetwork), (3,), (8, 9)),
    "weight averaging": (Job(callbacks=averaging, validation=True), (3, 8), (9, 12)),
    "averaging from configure_callbacks": (
        Job(module=lambda: averaging() and Averaged(), validation=True), (8,), (3, 9),
    ),
    "unfreezing": (Job(callbacks=lambda: [Unfreeze()], trainer={"max_epochs": 3}), (12,), (3, 8, 9, 16)),
    "loaders, cycling": (Job(module=Two, loader=several("max_size_cycle")), (5,), (3, 8, 9)),
    "loaders, longest": (Job(module=Two, loader=several("max_size")), (5,), (3, 8, 9)),
    "loaders, shortest": (Job(module=Two, loader=several("min_size")), (2, 3), (1, 4, 5)),
    "loaders, one without length": (Job(module=Two, loader=several("max_size_cycle", stream)), (5, 8), (3, 9)),
    "loaders, one without length, one passed": (
        Job(module=Two, loader=several("max_size_cycle", stream, short=20)), (6,), (3, 8, 9),
    ),
    "loaders reloaded": (Job(trainer={"reload_dataloaders_every_n_epochs": 2, "max_epochs": 4}), (12,), (8, 16, 20)),
    "early stopping": (Job(callbacks=impatient, validation=True, trainer={"max_epochs": 6}), (9,), (3, 8)),
    "part of the batches": (Job(trainer={"limit_train_batches": 5}), (5,), (3, 6, 9)),
    "part of the batches, stateful loader": (Job(loader=stateful, trainer={"limit_train_batches": 5}), (5,), (3, 6)),
    "part of the batches, iterable": (Job(loader=stream, trainer={"limit_train_batches": 5}), (5,), (3, 6)),
    "validation every second epoch": (
        Job(validation=True, trainer={"check_val_every_n_epoch": 2, "max_epochs": 4}), (9,), (8, 16, 17),
    ),
    "hyperparameters beyond weights_only": (Job(module=lambda: WithHyperparameters(pl.LightningModule())), (3,), ()),
    "learning rate finder": (
        Job(module=Searching, callbacks=lambda: [cb.LearningRateFinder(num_training_steps=5)]), (3,), (8, 9),
    ),
}
SCENARIOS["batch size finder"] = (
    Job(
        module=Sizing,
        loader=lambda: None,
        validation=True,
        callbacks=lambda: [cb.BatchSizeFinder(steps_per_trial=1, max_trials=2)],
    ),
    (3,),
    (4,),
)
FAST = [(name, step) for name, (_, steps, _) in SCENARIOS.items() for step in steps]
SLOW = [(name, step) for name, (_, _, steps) in SCENARIOS.items() for step in steps]


@pytest.mark.parametrize(("name", "step"), FAST)
def test_continues(name: str, step: int, tmp_path: Path) -> None:
    assert_continues(SCENARIOS[name][0], tmp_path, [step])


@pytest.mark.slow
@pytest.mark.parametrize(("name", "step"), SLOW)
def test_continues_at_other_steps(name: str, step: int, tmp_path: Path) -> None:
    assert_continues(SCENARIOS[name][0], tmp_path, [step])


def test_model_checkpoint_keeps_its_record(tmp_path: Path) -> None:
    """The best scores and their files are those of the control, and the files are there."""
    made: list[Any] = []

    def checkpoints() -> list[Any]:
        folder = tmp_path / ("files" if made else "control files")
        made.append(cb.ModelCheckpoint(folder, monitor="val", save_top_k=2, filename="{step}"))
        return [made[-1]]

    job = Job(validation=True, callbacks=checkpoints, trainer={"enable_checkpointing": True, "max_epochs": 3})
    _, lives = assert_continues(job, tmp_path, [12])
    control, resumed = made[0], made[-1]
    assert len(lives) == 2
    names = {Path(path).name: float(score) for path, score in control.best_k_models.items()}
    assert {Path(path).name: float(score) for path, score in resumed.best_k_models.items()} == names
    assert float(resumed.best_model_score) == float(control.best_model_score)


def test_averaged_weights_are_the_same(tmp_path: Path) -> None:
    """Not only the live weights: the average that validation uses and the end of the fit leaves."""

    class Seen(pl.Callback):
        def on_train_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
            average = next(c for c in trainer.callbacks if isinstance(c, cb.WeightAveraging))._average_model
            module.events.append(("average", average.module.net[0].weight.detach().clone()))

    job = Job(callbacks=lambda: [*averaging(), Seen()], validation=True)
    assert_continues(job, tmp_path, [5])


def test_the_found_learning_rate_is_kept(tmp_path: Path) -> None:
    job = SCENARIOS["learning rate finder"][0]
    control, lives = assert_continues(job, tmp_path, [3])
    assert_equal(lives[-1].module.lr, control.module.lr, "lr")
    finders = [c for c in lives[-1].trainer.callbacks if isinstance(c, cb.LearningRateFinder)]
    assert finders == []


@pytest.mark.parametrize(("before", "after"), [(plain, stream), (stream, stateful), (stateful, plain)])
def test_a_loader_of_another_kind_is_refused(
    before: Callable[[], Any], after: Callable[[], Any], tmp_path: Path
) -> None:
    """Its data would begin again inside the epoch. Nothing is trained, and the run goes on with the loader it had."""
    assert Job(loader=before).start(tmp_path, every="3 steps", kill=3).killed
    with pytest.raises(ResumeMismatchError, match="run was started with"):
        Job(loader=after).start(tmp_path)
    assert len(Job(loader=before).start(tmp_path).module.ids) == 13
