"""The Trainer class, patched in place: `train` and its loop meet the callback's fit. Subclasses that inherit get it."""

from __future__ import annotations

import functools
import logging
import os
from types import ModuleType
from typing import Any

from accelerate_spot.activation import left_alone

log = logging.getLogger(__name__)


def patch(module: ModuleType) -> None:
    """`module`: ``transformers.trainer``. Idempotent. Trainers without a SpotTrainerCallback are not changed by it.

    While ``SPOT_RUN`` is set, every Trainer made from then on has a SpotTrainerCallback.
    """
    cls = module.Trainer
    if hasattr(cls.train, "__spot__"):
        return
    for name, make in {"__init__": _init, "train": _train, "_inner_training_loop": _loop}.items():
        original = getattr(cls, name)
        replacement = functools.wraps(original)(make(original))
        replacement.__spot__ = True
        setattr(cls, name, replacement)


def _init(original: Any) -> Any:
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        with left_alone():  # its accelerator is not the script's
            original(self, *args, **kwargs)
        if os.environ.get("SPOT_RUN", "").strip() and _callback(self) is None:
            from accelerate_spot.trainer.callback import SpotTrainerCallback  # it needs this module

            callback = SpotTrainerCallback()
            callback.on_init_end(self.args, self.state, self.control)
            self.add_callback(callback)

    return __init__


def _train(original: Any) -> Any:
    def train(self: Any, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        callback = _callback(self)
        if callback is None or _is_trial(self):
            return original(self, resume_from_checkpoint, *args, **kwargs)
        with callback.fitting(self) as fit:
            return original(self, fit.choose(resume_from_checkpoint), *args, **kwargs)

    return train


def _loop(original: Any) -> Any:
    def _inner_training_loop(self: Any, *args: Any, **kwargs: Any) -> Any:
        callback = _callback(self)
        if callback is None or _is_trial(self):
            return original(self, *args, **kwargs)
        with callback.fitting(self) as fit:
            return fit.train(functools.partial(original, self), args, kwargs)

    return _inner_training_loop


def _callback(trainer: Any) -> Any:
    from accelerate_spot.trainer.callback import SpotTrainerCallback

    return next((each for each in trainer.callback_handler.callbacks if isinstance(each, SpotTrainerCallback)), None)


def _is_trial(trainer: Any) -> bool:
    if trainer.hp_search_backend is None:
        return False
    log.warning("spot: trials of a hyperparameter search are neither saved nor resumed")
    return True
