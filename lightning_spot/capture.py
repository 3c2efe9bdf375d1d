"""The state of a fit, taken apart for the session: what is written once, what each rank has of its own.

The base is Lightning's own checkpoint dict, from every rank. Beside it go what Lightning leaves out: random state,
running metrics, buffers, validation due or not, counters kept outside of the loops.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from lightning_spot import _compat, _compat_metrics, progress
from spot_core.clock import SYSTEM_CLOCK
from spot_core.pytorch import modules, nested, rng

DROPPABLE = ("hyper_parameters", "datamodule_hyper_parameters")
"""Keys that a resume does not need, and that may hold objects which only pickle can express."""

SHARED = ("state_dict", "optimizer_states", "current_model_state", "averaging_state", *DROPPABLE)
"""Keys of a Lightning checkpoint that are the same on all ranks; `current_model_state` is WeightAveraging's."""

_TUNERS = ("LearningRateFinder", "BatchSizeFinder")


def flags(trainer: Any) -> dict[str, Any]:
    """What follows this batch; asked before anything else, because validation moves it."""
    return {"validation_due": _compat.validation_due(trainer), "last_batch": _compat.last_batch(trainer)}


def capture(trainer: Any, module: Any, *, at_batch_end: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local); tensors are the live ones."""
    checkpoint = _compat.dump_checkpoint(trainer)
    if at_batch_end:
        progress.as_in_batch_end(checkpoint)
    shared = {key: checkpoint.pop(key) for key in SHARED if key in checkpoint}
    local = {
        "checkpoint": checkpoint,
        "rng": rng.capture(),
        "buffers": modules.buffers(module, shared["state_dict"], trainer.world_size),
        "modes": modules.modes(module),
        "metrics": _compat_metrics.metric_state(trainer, module),
        "clocks": _compat.clocks(trainer, SYSTEM_CLOCK.monotonic()),
        "should_stop": bool(trainer.should_stop),
        "validation_made": trainer.val_dataloaders is not None,
        "cycle": _compat.cycle_flags(trainer),
        "tuned": tuned_values(trainer, module),
    }
    return shared, local


def stable_tensors(trainer: Any) -> list[Tensor]:
    """Tensors that nothing changes before the next `on_before_optimizer_step`; empty when that is not certain.

    Parameters and optimizer state. Code of the user's that runs in between and may change weights, and callbacks that
    exchange them, make everything be copied at once instead.
    """
    module = trainer.lightning_module
    hooks = ("on_train_batch_start", "on_before_zero_grad", "optimizer_step", "optimizer_zero_grad")
    if any(_compat.overridden(trainer, name, module) for name in hooks):
        return []
    swapping = ("WeightAveraging", "StochasticWeightAveraging", "ModelPruning")
    if any(_compat.is_instance(trainer, callback, *swapping) for callback in trainer.callbacks):
        return []
    states = [nested.tensors(dict(optimizer.state)) for optimizer in trainer.optimizers]
    return [*module.parameters(), *(tensor for state in states for tensor in state)]


def tuners(trainer: Any) -> list[Any]:
    return [callback for callback in trainer.callbacks if _compat.is_instance(trainer, callback, *_TUNERS)]


def tuned_values(trainer: Any, module: Any) -> dict[str, Any]:
    """Values that tuner callbacks found, by attribute name: they are not searched again on a resume."""
    found: dict[str, Any] = {}
    for callback in tuners(trainer):
        names = [_compat.tuned_name(callback)] if _compat.tuned_name(callback) else ["lr", "learning_rate"]
        for name in names:
            for owner in _compat.attribute_owners(trainer, module):
                value = getattr(owner, str(name), None)
                if isinstance(value, (int, float)):
                    found[str(name)] = value
                    break
    return found


def set_tuned_values(trainer: Any, module: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        for owner in _compat.attribute_owners(trainer, module):
            if hasattr(owner, name):
                setattr(owner, name, value)
