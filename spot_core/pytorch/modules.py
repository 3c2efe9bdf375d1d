"""What a module has beside its state dict: buffers outside of it, modes; and what its snapshot will weigh."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from spot_core.pytorch import nested


def buffers(module: nn.Module, saved: Mapping[str, Any], world_size: int) -> dict[str, Tensor]:
    """Buffers that are not in the module's state, and with several ranks all: each rank's forward has its own."""
    return {name: buffer for name, buffer in module.named_buffers() if world_size > 1 or name not in saved}


def set_buffers(module: nn.Module, saved: Mapping[str, Tensor]) -> None:
    """Put back what `buffers` gave; what the module no longer has, or has in another shape, is left out."""
    present = dict(module.named_buffers())
    with torch.no_grad():
        for name, value in saved.items():
            if name in present and present[name].shape == value.shape:
                present[name].copy_(value)


def modes(module: nn.Module) -> dict[str, list[str]]:
    """Names of frozen parameters, of parts in eval mode and of norms without running statistics.

    Callbacks change them at the start of an epoch (to unfreeze a backbone); a resumed epoch has no start.
    """
    parts = list(module.named_modules())
    return {
        "frozen": [name for name, parameter in module.named_parameters() if not parameter.requires_grad],
        "eval": [name for name, part in parts if not part.training],
        "untracked": [name for name, part in parts if getattr(part, "track_running_stats", True) is False],
    }


def set_modes(module: nn.Module, saved: Mapping[str, list[str]]) -> None:
    """Put back what `modes` gave."""
    frozen, eval_, untracked = (set(saved[key]) for key in ("frozen", "eval", "untracked"))
    for name, parameter in module.named_parameters():
        if parameter.requires_grad is (name in frozen):
            parameter.requires_grad_(name not in frozen)
    for name, part in module.named_modules():
        part.training = name not in eval_
        if hasattr(part, "track_running_stats"):
            part.track_running_stats = name not in untracked  # type: ignore[assignment]


def frozen(module: nn.Module) -> list[Tensor]:
    """What of a module is not expected to change from save to save: parameters that nothing trains, and buffers."""
    return [*(one for one in module.parameters() if not one.requires_grad), *module.buffers()]


def trains(optimizer: torch.optim.Optimizer, module: nn.Module) -> bool:
    """Whether the optimizer has parameters of this module."""
    mine = {id(parameter) for parameter in module.parameters()}
    return any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])


def expected_bytes(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer], world_size: int) -> int:
    """About what this rank's snapshot will take, before the first one: its memory is checked and taken at the start.

    Optimizers make their state at their first step; until then two tensors for each parameter are assumed (Adam).
    The `world_size` ranks share what is replicated; 1 for a model of which each rank has its own part only.
    """
    parameters = sum(map(_bytes_here, module.parameters()))
    trained = sum(_bytes_here(parameter) for parameter in module.parameters() if parameter.requires_grad)
    extra = sum(map(_bytes_here, module.buffers()))
    held = sum(_bytes_here(tensor) for optimizer in optimizers for tensor in nested.tensors(dict(optimizer.state)))
    return (parameters + (held or 2 * trained)) // world_size + extra


def _bytes_here(tensor: Tensor) -> int:
    """Of a DTensor those of this rank's shard; its own `nbytes` are the whole's."""
    return nested.local(tensor).nbytes
