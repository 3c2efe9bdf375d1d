"""A model that the Trainer's strategy shards: its state through `spot_core.pytorch.sharded` instead of Lightning's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from spot_core.patches import Patches
from spot_core.pytorch import sharded

__all__ = ["Sharded"]


class Sharded:
    """The sharded model of one fit, from the strategy's set-up on. All methods are collective."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def model_state(self) -> dict[str, Any]:
        return sharded.model_state(self._trainer.strategy.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        # The trainer's wrapper, if it is one, hands out the optimizer itself.
        return sharded.optimizer_state(self._trainer.strategy.model, getattr(optimizer, "optimizer", optimizer))

    def template(self) -> dict[str, Any]:
        """What a generation is loaded into. It makes optimizer state where there is none, so only for a resume."""
        states = [self.optimizer_state(optimizer) for optimizer in self._trainer.optimizers]
        return {"state_dict": self.model_state(), "optimizer_states": states}

    def put(self, shared: Mapping[str, Any]) -> None:
        """Make a loaded state the model's and the optimizers'. Parameters were filled in place already."""
        model = self._trainer.strategy.model
        strict = bool(self._trainer.lightning_module.strict_loading)
        sharded.put_model_state(model, shared["state_dict"], strict=strict)
        for optimizer, state in zip(self._trainer.optimizers, shared["optimizer_states"], strict=True):
            sharded.put_optimizer_state(model, optimizer, state)

    @contextmanager
    def dumping(self) -> Iterator[None]:
        """Within, Lightning's own dump of a checkpoint holds the live shards, where it would gather or copy them."""
        patches = Patches()
        patches.around(self._trainer.strategy, "lightning_module_state_dict", lambda _: self.model_state)
        patches.around(self._trainer.strategy, "optimizer_state", lambda _: self.optimizer_state)
        try:
            yield
        finally:
            patches.undo()
