"""The state of a training, taken apart for the session: what is written once, what each rank has of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from accelerate_spot.trainer import _compat
from spot_core.pytorch import modules, nested, rng

_STATE = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)
"""Fields of TrainerState that training makes; the others say what the arguments say, and those of this start count."""


def capture(trainer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local); tensors are the live ones."""
    shared = {"model": trainer.model.state_dict(), "optimizer": trainer.optimizer.state_dict()}
    scaler = trainer.accelerator.scaler
    state = dataclasses.asdict(trainer.state)
    local = {
        "scheduler": trainer.lr_scheduler.state_dict(),
        "scaler": None if scaler is None else scaler.state_dict(),
        "state": {name: state[name] for name in _STATE},
        "control": dataclasses.asdict(trainer.control),
        "losses": _compat.losses(trainer),
        "own": _compat.own_values(trainer),
        "flos": trainer.current_flos,
        "callbacks": [list(each) for each in _callback_states(trainer)],
        "buffers": modules.buffers(trainer.model, shared["model"], trainer.args.world_size),
        "modes": modules.modes(trainer.model),
        "batch_size": _compat.batch_size(trainer),
        "rng": rng.capture(),
    }
    return shared, local


def set_state(trainer: Any, saved: dict[str, Any]) -> None:
    """TrainerState as it was; see `_STATE`."""
    for name in _STATE:
        setattr(trainer.state, name, saved[name])


def set_control(trainer: Any, saved: dict[str, Any]) -> None:
    for name, value in saved.items():
        if hasattr(trainer.control, name):
            setattr(trainer.control, name, value)


def _callback_states(trainer: Any) -> Iterator[tuple[str, str, Any]]:
    """(class, kind, state) of each callback that has one."""
    for callback in trainer.callback_handler.callbacks:
        if hasattr(callback, "state_dict") and hasattr(callback, "load_state_dict"):
            yield type(callback).__qualname__, "state_dict", callback.state_dict()
        elif isinstance(callback, _compat.ExportableState):
            yield type(callback).__qualname__, "attributes", callback.state().get("attributes", {})


def set_callback_states(trainer: Any, saved: list[list[Any]]) -> None:
    """To the callbacks of the same classes, in their order."""
    left = list(trainer.callback_handler.callbacks)
    for name, kind, state in saved:
        callback = next((each for each in left if type(each).__qualname__ == name), None)
        if callback is None:
            continue
        left.remove(callback)
        if kind == "state_dict":
            callback.load_state_dict(state)
        else:
            for attribute, value in state.items():
                setattr(callback, attribute, value)


def plain_optimizer(trainer: Any) -> Any:
    """The user's optimizer inside accelerate's."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def exchanges_weights(trainer: Any) -> bool:
    """Optimizers that train on other weights than they evaluate with (schedule-free ones)."""
    optimizer = plain_optimizer(trainer)
    return callable(getattr(optimizer, "eval", None)) and callable(getattr(optimizer, "train", None))


def stable_tensors(trainer: Any, shared: dict[str, Any]) -> list[Tensor]:
    """Tensors that nothing changes before the next `on_pre_optimizer_step`; empty when that is not certain.

    Optimizers that step inside the backward pass, layer by layer, and those that exchange weights for an evaluation
    make everything be copied at once instead.
    """
    name = str(getattr(trainer.args.optim, "value", trainer.args.optim))
    if "layerwise" in name or "lomo" in name or exchanges_weights(trainer):
        return []
    return [*trainer.model.parameters(), *nested.tensors(shared["optimizer"])]
