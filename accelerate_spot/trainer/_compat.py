"""All that is taken from transformers; tests/trainer/test_compat.py fails when a private name of it vanishes.

Known to work with transformers 5.24. `check` refuses a version in which one of the names is gone.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import transformers
from torch.utils.data import SequentialSampler
from transformers.trainer_callback import ExportableState, TrainerCallback
from transformers.trainer_utils import TrainOutput, get_last_checkpoint

from spot_core.errors import ConfigError

__all__ = ["ExportableState", "TrainOutput", "TrainerCallback", "get_last_checkpoint"]  # and what is defined here

module = importlib.import_module("transformers.trainer")
"""Not by attribute: it may be in the middle of its own import."""

METHODS = (
    "_inner_training_loop",  # one training: everything between the first loader and the last callback
    "_init_training_state",  # makes TrainerState, and says in which epoch and where in it training begins
    "_load_optimizer_and_scheduler",
    "_load_scaler",
    "_load_rng_state",  # too late for us: after the first batches were fetched
    "_run_epoch",
    "_maybe_log_save_evaluate",  # everything that follows an optimizer step or an epoch
    "_finalize_training",  # loads the best model, writes the last row
)
"""Methods of the Trainer that are replaced on the instance while it trains."""

VALUES = (
    "_tr_loss",  # tensor: sum of losses since the last logged row
    "_total_loss_scalar",  # the same, up to the last row
    "_globalstep_last_logged",
    "_initial_global_step",  # the mean loss of the whole training counts from here
)
"""Sums behind the logged losses; made anew at each start of the loop."""

OWN_VALUES = (
    "_metrics",  # dict by mode of dicts of lists: what the next logged row is the mean of
    "_total_train_tokens",
    "_step",  # forward passes, which decide when a generation of samples is due
)
"""The same of TRL's trainers, which keep them beside those of the Trainer."""

PARAMETERS = {
    "_inner_training_loop": ("batch_size", "resume_from_checkpoint"),
    "_init_training_state": ("num_update_steps_per_epoch", "resume_from_checkpoint"),
    "_run_epoch": (
        *("model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"),
        *("ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"),
        "steps_trained_in_current_epoch",
    ),
    "_maybe_log_save_evaluate": (
        *("tr_loss", "grad_norm", "model", "trial", "epoch", "ignore_keys_for_eval", "start_time", "learning_rate"),
    ),
    "_finalize_training": ("start_time",),
}
"""Parameters that are read or replaced on the way through."""


def check(trainer: Any) -> None:
    """Raises ConfigError when this version of transformers is put together in another way."""
    missing = [name for name in METHODS if not hasattr(trainer, name)]
    for name, parameters in PARAMETERS.items():
        if name not in missing:
            present = inspect.signature(getattr(trainer, name)).parameters
            missing += [f"{name}({parameter})" for parameter in parameters if parameter not in present]
    if not hasattr(module, "skip_first_batches"):
        missing.append("skip_first_batches")
    if missing:
        raise ConfigError(
            f"The Trainer of transformers {transformers.__version__} has no {', '.join(missing)}: its loop is another "
            "than the one that is known to be resumed exactly.",
            hint="Use transformers 5.24.",
        )


@contextmanager
def skipping(skip: Callable[[Any, int], Any]) -> Iterator[None]:
    """`skip(loader, batches)` in place of accelerate's function, which builds another loader: its place is unknown.

    Why here: the Trainer calls it by the name in its module.
    """
    original = module.skip_first_batches
    module.skip_first_batches = lambda loader, num_batches=0: skip(loader, num_batches)
    try:
        yield
    finally:
        module.skip_first_batches = original


def do_what_is_due(trainer: Any, **given: Any) -> None:
    """The row, the evaluation and the checkpoint that follow a step."""
    trainer._maybe_log_save_evaluate(tr_loss=trainer._tr_loss, **given)


def batch_size(trainer: Any) -> int:
    """Per process and forward pass; what `auto_find_batch_size` has come to."""
    return int(trainer._train_batch_size)


def losses(trainer: Any) -> dict[str, Any]:
    return {name: getattr(trainer, name) for name in VALUES}


def set_losses(trainer: Any, saved: dict[str, Any]) -> None:
    for name in VALUES:
        value = saved[name]
        setattr(trainer, name, value.to(trainer.args.device) if hasattr(value, "to") else value)


def own_values(trainer: Any) -> dict[str, Any]:
    return {name: _plain(getattr(trainer, name)) for name in OWN_VALUES if hasattr(trainer, name)}


def set_own_values(trainer: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if isinstance(value, dict):
            _fill(getattr(trainer, name, {}), value)
        else:
            setattr(trainer, name, value)


def _plain(value: Any) -> Any:
    """Of plain dicts, without their factories."""
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _fill(present: dict[str, Any], saved: dict[str, Any]) -> None:
    """The dicts stay what they are: they make what is missing."""
    for key, value in saved.items():
        if isinstance(value, dict) and isinstance(present.get(key), dict):
            _fill(present[key], value)
        else:
            present[key] = value


def mean_losses(saved: list[dict[str, Any]]) -> dict[str, Any]:
    """The sums of several processes as one of another number of processes is to have them: only the first differ."""
    return {**saved[0], "_tr_loss": sum(each["_tr_loss"] for each in saved) / len(saved)}


def inner_loader(loader: Any) -> Any:
    """The DataLoader that accelerate's wrapper reads from; None for any other loader.

    (`base_dataloader` has no underscore, but no documentation either. The wrapper says it is of its loader's class.)
    """
    return vars(loader).get("base_dataloader") if hasattr(loader, "__dict__") else None


def shares_one_order(loader: Any) -> bool:
    """Whether accelerate deals the batches of one order to the processes, the same one for any number of them.

    (`initial_seed` marks accelerate's SeedableRandomSampler, whose order is a function of it and of the epoch.)
    """
    if inner_loader(loader) is None or not hasattr(loader, "rng_types"):
        return False
    sampler = loader.get_sampler()
    return isinstance(sampler, SequentialSampler) or hasattr(sampler, "initial_seed")
