"""State of models that are sharded over the ranks (FSDP, FSDP2, tensor parallel): each rank's shards of it.

Read and put back through `torch.distributed.checkpoint.state_dict`, which names parameters and optimizer state alike
for all of these and knows each shard's place in the whole, so that a generation fits any other number of ranks and
any other mesh. The tensors are the live ones: nothing is gathered, and nothing is copied before it is staged.
Every function is collective over the ranks of the model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, distribute_tensor

__all__ = ["as_shard", "model_state", "optimizer_state", "put_model_state", "put_optimizer_state", "reshard"]


def reshard(model: nn.Module) -> None:
    """Let go of the parameters that `fully_shard` has gathered: an evaluation leaves some of them so.

    Until then the model's parameters are not the optimizer's. Other models are left alone. A model's own state is in
    shards in any case: torch sees to that.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def model_state(model: nn.Module) -> dict[str, Any]:
    """Parameters and buffers by name, without the names that wrappers add."""
    return dict(get_model_state_dict(model, options=_options()))


def optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """State and groups by the names of `model`'s parameters. An optimizer that has no state yet is given one."""
    reshard(model)
    return dict(get_optimizer_state_dict(model, optimizer, options=_options()))


def put_model_state(model: nn.Module, state: Mapping[str, Any], *, strict: bool = True) -> None:
    """Make `state`, which may be the filled result of `model_state`, the model's."""
    set_model_state_dict(model, dict(state), options=_options(strict=strict))


def as_shard(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's part of `whole`, which every rank has, placed as the DTensor `like` is. Not collective."""
    if not isinstance(like, DTensor):
        return whole.to(like.device)
    return distribute_tensor(whole.to(like.device), like.device_mesh, like.placements, src_data_rank=None)


def put_optimizer_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Make `state`, which may be the filled result of `optimizer_state`, the optimizer's."""
    reshard(model)
    set_optimizer_state_dict(model, optimizer, dict(state), options=_options())


def _options(*, strict: bool = True) -> StateDictOptions:
    return StateDictOptions(full_state_dict=False, cpu_offload=False, strict=strict)
