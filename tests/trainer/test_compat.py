"""Names of transformers and accelerate that are not public: each is there, and does what is relied on."""

from __future__ import annotations

import inspect
from collections import defaultdict
from typing import Any

import pytest
import torch
import transformers
from accelerate import Accelerator
from torch.utils.data import DataLoader
from transformers import Trainer, TrainerCallback
from transformers.trainer_callback import CallbackHandler, TrainerState

from accelerate_spot.trainer import _compat, capture
from spot_core.errors import ConfigError

LOOP = "_inner_training_loop"


@pytest.mark.parametrize("name", _compat.METHODS)
def test_a_version_without_one_of_the_methods_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _compat.check(Trainer)
    monkeypatch.delattr(Trainer, name)
    with pytest.raises(ConfigError, match=f"transformers {transformers.__version__} has no {name}"):
        _compat.check(Trainer)


@pytest.mark.parametrize(
    ("method", "parameter"), [(method, name) for method, names in _compat.PARAMETERS.items() for name in names]
)
def test_a_version_with_other_parameters_is_refused(
    method: str, parameter: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    signature = inspect.signature(getattr(Trainer, method))
    others = [each for each in signature.parameters.values() if each.name != parameter]
    assert len(others) < len(signature.parameters)

    def other(*args: Any, **kwargs: Any) -> None: ...

    other.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
    monkeypatch.setattr(Trainer, method, other)
    with pytest.raises(ConfigError, match=rf"{method}\({parameter}\)"):
        _compat.check(Trainer)


def test_the_loop_makes_the_sums_and_uses_the_names() -> None:
    loop = inspect.getsource(inspect.unwrap(getattr(Trainer, LOOP)))
    assert [name for name in _compat.VALUES if f"self.{name} =" not in loop] == []
    asked = ("get_train_dataloader()", "_init_training_state(", "_prepare_for_training(", "on_train_begin(")
    places = [loop.index(each) for each in (*asked, "args.eval_on_start", "_run_epoch(", "_finalize_training(")]
    assert places == sorted(places)


def test_the_boundary_comes_after_every_on_step_end() -> None:
    epoch = inspect.getsource(getattr(Trainer, "_run_epoch"))  # noqa: B009 - private, by name
    epoch = epoch[epoch.index("skip_first_batches(") :]
    order = (
        *("num_update_steps_trained =", "iter(train_dataloader)", "get_batch_samples(", "on_pre_optimizer_step("),
        *("self.optimizer.step()", "lr_scheduler.step()", "global_step += 1", "on_step_end("),
        *("_maybe_log_save_evaluate(", "on_epoch_end("),
    )
    places = [epoch.index(each) for each in order]
    assert places == sorted(places)


def test_the_trainer_calls_skipping_by_its_modules_name() -> None:
    original = _compat.module.skip_first_batches
    with _compat.skipping(lambda loader, batches: (loader, batches)):
        assert _compat.module.skip_first_batches([1, 2], 1) == ([1, 2], 1)
        assert _compat.module.skip_first_batches([1, 2], num_batches=2) == ([1, 2], 2)
    assert _compat.module.skip_first_batches is original


def test_the_trainers_loader_is_known_from_others() -> None:
    plain = DataLoader(torch.arange(6), batch_size=2)
    wrapper = Accelerator(cpu=True).prepare(plain)
    assert isinstance(_compat.inner_loader(wrapper), DataLoader)
    assert _compat.inner_loader(plain) is None
    assert _compat.inner_loader([]) is None


def test_what_trainers_of_trl_keep_beside_the_losses() -> None:
    class Theirs:
        def __init__(self) -> None:
            self._metrics = {"train": defaultdict(list), "eval": defaultdict(list)}
            self._total_train_tokens = 0

    trained, resumed = Theirs(), Theirs()
    trained._metrics["train"]["entropy"] += [0.5, 0.25]
    trained._total_train_tokens = 7
    saved = _compat.own_values(trained)
    assert saved == {"_metrics": {"train": {"entropy": [0.5, 0.25]}, "eval": {}}, "_total_train_tokens": 7}
    assert type(saved["_metrics"]["train"]) is dict
    _compat.set_own_values(resumed, saved)
    resumed._metrics["train"]["loss"].append(1.0)
    assert resumed._metrics == {"train": {"entropy": [0.5, 0.25], "loss": [1.0]}, "eval": {}}
    assert resumed._total_train_tokens == 7
    assert _compat.own_values(object()) == {}


def test_the_state_that_training_makes_is_known() -> None:
    """A field that is added to TrainerState has to be looked at: is it made by training, or by arguments?"""
    by_arguments = {
        *("max_steps", "logging_steps", "eval_steps", "save_steps", "train_batch_size", "num_train_epochs"),
        *("is_local_process_zero", "is_world_process_zero", "is_hyper_param_search", "trial_name", "trial_params"),
        "stateful_callbacks",
    }
    assert set(vars(TrainerState())) == {*capture._STATE, *by_arguments}


def test_every_event_of_the_callback_is_one_of_the_trainers() -> None:
    from accelerate_spot.trainer import SpotTrainerCallback

    mine = [name for name in vars(SpotTrainerCallback) if name.startswith("on_")]
    assert mine
    assert [name for name in mine if not hasattr(TrainerCallback, name)] == []
    assert "callbacks" in vars(CallbackHandler([], None, None, None, None))
