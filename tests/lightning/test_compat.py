"""The private names of Lightning that are used exist and mean what is assumed; this fails when one of them vanishes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy
from torch import nn
from torch.utils.data import DataLoader

from lightning_spot import _compat, _compat_metrics
from lightning_spot.capture import tuners

from ._harness import SILENT, Net, plain


class Probe(pl.Callback):
    """Asks in the middle of a fit, as the callback does."""

    def __init__(self) -> None:
        self.seen: dict[str, Any] = {}

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 2:
            return
        self.seen = {
            "due": _compat.validation_due(trainer),
            "last": _compat.last_batch(trainer),
            "accumulating": _compat.accumulating(trainer),
            "finishing": _compat.finishing(trainer),
            "ahead": _compat.looks_ahead(trainer),
            "fetched": _compat.fetched_ahead(trainer),
            "hands out": _compat.hands_out_iterator(trainer),
            "cycle": _compat.cycle_flags(trainer),
            "clocks": _compat.clocks(trainer, 100.0),
            "metrics": _compat_metrics.metric_state(trainer, module),
            "dump": _compat.dump_checkpoint(trainer),
        }
        for owner, name in (
            _compat.restore_owner(trainer),
            _compat.boundary_owner(trainer),
            _compat.validation_due_owner(trainer),
            _compat.signal_owner(trainer),
        ):
            assert callable(getattr(owner, name)), name


@pytest.fixture
def probed() -> tuple[Probe, Any]:
    probe = Probe()
    trainer = pl.Trainer(max_epochs=1, limit_val_batches=0, callbacks=[probe], accumulate_grad_batches=2, **SILENT)
    trainer.fit(Net(), plain())
    return probe, trainer


def test_names_mean_what_is_assumed(probed: tuple[Probe, Any]) -> None:
    seen = probed[0].seen
    asked = ("due", "last", "accumulating", "finishing", "ahead", "fetched", "hands out")
    assert {key: seen[key] for key in asked} == {
        "due": False,
        "last": False,
        "accumulating": True,
        "finishing": False,
        "ahead": False,
        "fetched": 0,
        "hands out": False,
    }
    assert seen["cycle"] == [False]
    assert seen["clocks"]["train_reload_epoch"] == 0
    assert set(seen["metrics"]["results"]) == {"training_step.loss", "training_step.mean"}
    assert int(seen["metrics"]["results"]["training_step.loss"]["size"]) == 12
    assert set(seen["metrics"]["modules"]) == {"mean"}


def test_the_checkpoint_has_the_keys_that_are_repaired(probed: tuple[Probe, Any]) -> None:
    loop = probed[0].seen["dump"]["loops"]["fit_loop"]
    assert loop["epoch_loop.batch_progress"]["current"] == {"ready": 3, "started": 3, "processed": 3, "completed": 2}
    assert set(loop["epoch_loop.val_loop.batch_progress"]) >= {"total", "current", "is_last_batch"}
    assert loop["epoch_loop.state_dict"] == {"_batches_that_stepped": 1}
    assert loop["epoch_progress"]["current"]["processed"] == 0


def test_the_boundary_is_called_once_per_batch_after_every_hook() -> None:
    calls: list[str] = []

    class Module(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            calls.append("module")

    class Callback(pl.Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            owner, name = _compat.boundary_owner(trainer)
            original = getattr(owner, name)
            setattr(owner, name, lambda: (original(), calls.append("boundary")))

        def on_train_batch_end(self, *args: Any) -> None:
            calls.append("callback")

    trainer = pl.Trainer(max_steps=2, limit_val_batches=0, callbacks=[Callback()], **SILENT)
    trainer.fit(Module(), plain())
    assert calls == ["callback", "module", "boundary"] * 2


def test_tuner_callbacks_are_known() -> None:
    finder = pl.callbacks.LearningRateFinder(attr_name="rate")
    trainer = pl.Trainer(callbacks=[finder], **SILENT)
    assert tuners(trainer) == [finder]
    assert hasattr(finder, "_early_exit")
    assert _compat.early_exit(finder) is False
    assert _compat.tuned_name(finder) == "rate"
    assert _compat.tuned_name(pl.callbacks.BatchSizeFinder(batch_arg_name="size")) == "size"


def test_running_metrics_go_on(probed: tuple[Probe, Any]) -> None:
    """Sums put into a trainer give the mean that the interrupted one would have had."""
    saved = probed[0].seen["metrics"]
    trainer = pl.Trainer(max_epochs=1, limit_val_batches=0, **SILENT)
    module = Net()
    trainer.strategy.connect(module)
    trainer.training = True
    _compat_metrics.restore_metric_state(trainer, module, saved)
    result = trainer.fit_loop.epoch_loop._results["training_step.loss"]
    assert torch.equal(result.compute(), saved["results"]["training_step.loss"]["value"] / 12)
    assert torch.equal(module.mean.mean_value, saved["modules"]["mean"]["states"]["mean_value"])


def test_the_stop_is_an_orderly_end_with_a_code(probed: tuple[Probe, Any]) -> None:
    from lightning.pytorch.utilities.exceptions import SIGTERMException

    stop = _compat.stop_exception(probed[1], 143)
    assert isinstance(stop, SIGTERMException)
    assert stop.code == 143


def test_fabrics_wrappers_are_known() -> None:
    """What `SpotFabric` looks into, and that it counts and sets the passes that the wrapper tells its sampler."""
    fabric = Fabric(accelerator="cpu", devices=1)
    module, loader = nn.Linear(1, 1), DataLoader(range(4))
    wrapped, optimizer = fabric.setup(module, torch.optim.SGD(module.parameters(), lr=0.1))
    assert _compat.inside_fabric_module(wrapped, sharded=False) is module
    assert _compat.inside_fabric_module(wrapped, sharded=True) is wrapped._forward_module
    assert type(_compat.inside_fabric_optimizer(optimizer)) is torch.optim.SGD
    data = fabric.setup_dataloaders(loader)
    assert _compat.inside_fabric_loader(data) is loader
    list(data)
    assert _compat.fabric_passes(data) == 1
    _compat.set_fabric_passes(data, 5)
    _compat.put_inside_fabric_loader(data, [7])
    assert list(data) == [7]
    assert _compat.fabric_passes(data) == 6
    assert not _compat.fabric_shards(fabric)
    assert not _compat.fabric_has_engine(fabric)


def test_strategies_are_known_by_their_base() -> None:
    class Mine(FSDPStrategy):
        pass

    assert _compat.fabric_shards(SimpleNamespace(strategy=Mine()))
    assert _compat.fabric_shards(SimpleNamespace(strategy=ModelParallelStrategy(lambda model, mesh: model)))
    assert _compat.fabric_has_engine(SimpleNamespace(strategy=object.__new__(DeepSpeedStrategy)))
