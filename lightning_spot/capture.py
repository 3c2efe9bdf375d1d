"""The state of a fit, taken apart for the session: what is written once, what each rank has of its own.

The base is Lightning's own checkpoint dict, from every rank. Beside it go what Lightning leaves out: random state,
running metrics, buffers, validation due or not, counters kept outside of the loops.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from lightning_spot import _compat, progress
from spot_core.clock import SYSTEM_CLOCK
from spot_core.pytorch import rng

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
        "buffers": _buffers(module, shared["state_dict"], trainer.world_size),
        "modes": modes(module),
        "metrics": _compat.metric_state(trainer, module),
        "clocks": _compat.clocks(trainer, SYSTEM_CLOCK.monotonic()),
        "should_stop": bool(trainer.should_stop),
        "validation_made": trainer.val_dataloaders is not None,
        "cycle": _compat.cycle_flags(trainer),
        "tuned": tuned_values(trainer, module),
    }
    return shared, local


def _buffers(module: Any, saved: dict[str, Any], world_size: int) -> dict[str, Tensor]:
    """Buffers that are not in the module's state, and with several ranks all: each rank's forward has its own."""
    return {name: buffer for name, buffer in module.named_buffers() if world_size > 1 or name not in saved}


def modes(module: Any) -> dict[str, list[str]]:
    """Names of frozen parameters, of parts in eval mode and of norms without running statistics.

    Callbacks change them at the start of an epoch (BackboneFinetuning unfreezes); a resumed epoch has no start.
    """
    parts = list(module.named_modules())
    return {
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "eval": [name for name, part in parts if not part.training],
        "untracked": [name for name, part in parts if getattr(part, "track_running_stats", True) is False],
    }


def set_modes(module: Any, saved: dict[str, list[str]]) -> None:
    frozen, eval_, untracked = (set(saved[key]) for key in ("frozen", "eval", "untracked"))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, part in module.named_modules():
        part.training = name not in eval_
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = name not in untracked


def stable_tensors(trainer: Any, shared: dict[str, Any]) -> list[Tensor]:
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
    return [*module.parameters(), *_tensors(shared.get("optimizer_states"))]


def expected_bytes(trainer: Any, module: Any) -> int:
    """About what this rank's snapshot will take, before the first one: its memory is checked and taken at the start.

    Optimizers make their state at their first step; until then two tensors for each parameter are assumed (Adam).
    Ranks share what is replicated.
    """
    parameters = sum(parameter.nbytes for parameter in module.parameters())
    trained = sum(parameter.nbytes for parameter in module.parameters() if parameter.requires_grad)
    buffers = sum(buffer.nbytes for buffer in module.buffers())
    optimizers = sum(tensor.nbytes for optimizer in trainer.optimizers for tensor in _tensors(dict(optimizer.state)))
    return (parameters + (optimizers or 2 * trained)) // int(trainer.world_size) + buffers


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def frozen(value: Any) -> Any:
    """A copy that later events cannot change; tensors lose their graph."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: frozen(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(frozen(item) for item in value)
    return copy.deepcopy(value)


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
