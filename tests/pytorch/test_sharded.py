"""The state of a sharded model right after an evaluation, which leaves its parameters gathered."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from spot_core.pytorch import sharded
from spot_core.pytorch.stage import storage_ids


@pytest.fixture
def evaluated() -> Iterator[tuple[nn.Module, torch.optim.Optimizer]]:
    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        model = nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 1))
        fully_shard(model[0], mesh=mesh)
        fully_shard(model, mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
        with torch.no_grad():
            model(torch.ones(4, 2))
        yield model, optimizer
    finally:
        dist.destroy_process_group()


def test_the_optimizers_state_is_known_by_the_models_names(evaluated: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = evaluated
    assert not all(isinstance(parameter, DTensor) for parameter in model.parameters()), "nothing is gathered: no test"
    state = sharded.optimizer_state(model, optimizer)["state"]
    assert sorted(state) == ["0.bias", "0.weight", "1.bias", "1.weight"]
    assert all(isinstance(moments["exp_avg"], DTensor) for moments in state.values())


def test_a_state_is_put_back(evaluated: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, optimizer = evaluated
    saved = {name: value.detach().clone() for name, value in sharded.model_state(model).items()}
    state = sharded.optimizer_state(model, optimizer)
    moments = {name: each["exp_avg"].clone() for name, each in state["state"].items()}
    model(torch.ones(4, 2)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(4, 2))
    state["state"] = {name: {**each, "exp_avg": moments[name]} for name, each in state["state"].items()}
    sharded.put_optimizer_state(model, optimizer, state)
    with torch.no_grad():
        model(torch.ones(4, 2))
    sharded.put_model_state(model, saved)
    for name, value in sharded.model_state(model).items():
        assert torch.equal(value.to_local(), saved[name].to_local())
    for name, each in sharded.optimizer_state(model, optimizer)["state"].items():
        assert torch.equal(each["exp_avg"].to_local(), moments[name].to_local())


def test_the_models_state_is_in_shards(evaluated: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    model, _ = evaluated
    assert all(isinstance(value, DTensor) for value in sharded.model_state(model).values())


def test_a_shard_is_told_apart_by_its_own_memory(evaluated: tuple[nn.Module, torch.optim.Optimizer]) -> None:
    """The memory that a plan copies from: of all shards one by one, and beside tensors that are none."""
    model, _ = evaluated
    shards, plain = list(sharded.model_state(model).values()), torch.ones(3)
    own = [shard.to_local().untyped_storage().data_ptr() for shard in shards]
    assert all(own)
    assert len(set(own)) == len(shards)
    assert storage_ids(shards) == frozenset(own)
    assert storage_ids([plain, *shards]) == {plain.data_ptr(), *own}
    assert storage_ids([plain, nn.Parameter(plain)]) == {plain.data_ptr()}
