"""The state of a Fabric loop, taken apart for the session and put back."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from lightning_spot import _compat
from spot_core.errors import ConfigError
from spot_core.pytorch import fits, modules, nested, sharded

__all__ = ["FabricState"]


@dataclass
class FabricState:
    """The entries of the caller's dict by kind; modules and optimizers without Fabric's wrappers."""

    shards: bool
    world_size: int
    precision: Any
    """Fabric's plugin, which has the loss scaler."""
    modules: dict[str, nn.Module] = field(default_factory=dict)
    wrapped: dict[str, Any] = field(default_factory=dict)
    optimizers: dict[str, torch.optim.Optimizer] = field(default_factory=dict)
    stateful: dict[str, Any] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, fabric: Any, state: Mapping[str, Any]) -> FabricState:
        """Raises ConfigError without an entry "step", and for a sharded model's optimizer without that model."""
        if "step" not in state:
            raise ConfigError('the state of a SpotFabric needs an entry "step": the number of optimizer steps done')
        found = cls(_compat.fabric_shards(fabric), int(fabric.world_size), fabric.strategy.precision)
        for name, value in state.items():
            optimizer = _compat.inside_fabric_optimizer(value)
            if isinstance(value, nn.Module):
                found.wrapped[name] = value
                found.modules[name] = _compat.inside_fabric_module(value, sharded=found.shards)
            elif isinstance(optimizer, torch.optim.Optimizer):
                found.optimizers[name] = optimizer
            elif hasattr(value, "state_dict") and hasattr(value, "load_state_dict"):
                found.stateful[name] = value
            else:
                found.values[name] = value
        if found.shards:
            for module in found.modules.values():
                sharded.reshard(module)
            for name in found.optimizers:
                found._model_of(name)
        return found

    def fingerprint(self) -> str:
        """Names and shapes of all modules; other ones are another run."""
        return fits.fingerprint(
            {f"{name}.{key}": value for name in self.modules for key, value in self._module_state(name).items()}
        )

    def expected_bytes(self) -> int:
        ranks = 1 if self.shards else self.world_size  # of a sharded model a rank sees its own part only
        return sum(modules.expected_bytes(module, self._optimizers_of(module), ranks) for module in
                   self.modules.values())

    def template(self) -> dict[str, Any] | None:
        """What a generation is loaded into, for shards; whole tensors are loaded on their own. Collective."""
        return self._shared() if self.shards else None

    def capture(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """(shared, local); tensors are the live ones. Collective for a sharded model."""
        shared = self._shared()
        local = {
            "stateful": {name: value.state_dict() for name, value in self.stateful.items()},
            "values": self.values,
            "precision": self.precision.state_dict(),
            "buffers": {
                name: modules.buffers(module, shared[name], self.world_size)
                for name, module in self.modules.items()
            },
            "modes": {name: modules.modes(module) for name, module in self.modules.items()},
        }
        return shared, local

    def put(self, shared: Mapping[str, Any], local: Mapping[str, Any], state: MutableMapping[str, Any]) -> None:
        """Make a loaded generation the state. Collective for a sharded model."""
        for name, module in self.modules.items():
            if self.shards:
                sharded.put_model_state(module, shared[name])
            else:
                self.wrapped[name].load_state_dict(shared[name])
            modules.set_buffers(module, local["buffers"][name])
            modules.set_modes(module, local["modes"][name])
        for name, optimizer in self.optimizers.items():
            if self.shards:
                sharded.put_optimizer_state(self._model_of(name), optimizer, shared[name])
            else:
                optimizer.load_state_dict(shared[name])
        for name, value in self.stateful.items():
            value.load_state_dict(local["stateful"][name])
        self.precision.load_state_dict(local["precision"])
        state.update(local["values"])

    def frozen(self) -> list[torch.Tensor]:
        """Tensors that are not expected to change from save to save."""
        return [tensor for module in self.modules.values() for tensor in modules.frozen(module)]

    def stable(self) -> list[torch.Tensor]:
        """What only an optimizer's step changes: what it trains, and its state.

        Not all parameters: an averaged copy of the model is changed by the loop itself, whenever it likes.
        """
        trained = [p for optimizer in self.optimizers.values() for group in optimizer.param_groups
                   for p in group["params"]]
        return [*trained, *(t for optimizer in self.optimizers.values() for t in nested.tensors(dict(optimizer.state)))]

    def _shared(self) -> dict[str, Any]:
        shared: dict[str, Any] = {name: self._module_state(name) for name in self.modules}
        for name, optimizer in self.optimizers.items():
            if self.shards:
                shared[name] = sharded.optimizer_state(self._model_of(name), optimizer)
            else:
                shared[name] = optimizer.state_dict()
        return shared

    def _module_state(self, name: str) -> dict[str, Any]:
        return sharded.model_state(self.modules[name]) if self.shards else self.wrapped[name].state_dict()

    def _optimizers_of(self, module: nn.Module) -> list[torch.optim.Optimizer]:
        return [optimizer for optimizer in self.optimizers.values() if modules.trains(optimizer, module)]

    def _model_of(self, name: str) -> nn.Module:
        """The model whose parameters the optimizer of this name trains: its names are the optimizer state's."""
        optimizer = self.optimizers[name]
        for module in self.modules.values():
            if optimizer in self._optimizers_of(module):
                return module
        raise ConfigError(
            f'state["{name}"] is the optimizer of a sharded model that is not in the state.',
            hint="Put the model into the state as well, as fabric.setup gave it.",
        )
