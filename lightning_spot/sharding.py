"""Models that the strategy shards (FSDP, FSDP2, tensor parallel): their state, each rank's shards of it.

Read and put back through `torch.distributed.checkpoint.state_dict`, which names parameters and optimizer state alike
for all of these and knows each shard's place in the whole, so that a generation fits any other number of ranks and
any other mesh. The tensors are the live ones: nothing is gathered, and nothing is copied before it is staged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from spot_core.patches import Patches

__all__ = ["Sharded"]


class Sharded:
    """The sharded model of one fit, from the strategy's set-up on. All methods are collective."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def model_state(self) -> dict[str, Any]:
        return dict(get_model_state_dict(self._trainer.strategy.model, options=_options()))

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        # The trainer's wrapper, if it is one, hands out the optimizer itself.
        inner = getattr(optimizer, "optimizer", optimizer)
        return dict(get_optimizer_state_dict(self._trainer.strategy.model, inner, options=_options()))

    def template(self) -> dict[str, Any]:
        """What a generation is loaded into. It makes optimizer state where there is none, so only for a resume."""
        states = [self.optimizer_state(optimizer) for optimizer in self._trainer.optimizers]
        return {"state_dict": self.model_state(), "optimizer_states": states}

    def put(self, shared: Mapping[str, Any]) -> None:
        """Make a loaded state the model's and the optimizers'. Parameters were filled in place already."""
        model = self._trainer.strategy.model
        strict = bool(self._trainer.lightning_module.strict_loading)
        set_model_state_dict(model, shared["state_dict"], options=_options(strict=strict))
        for optimizer, state in zip(self._trainer.optimizers, shared["optimizer_states"], strict=True):
            set_optimizer_state_dict(model, optimizer, state, options=_options())

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


def _options(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=False, cpu_offload=False, strict=strict)
