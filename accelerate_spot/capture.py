"""The state of a training, taken apart for the session and put back: what is written once, what each rank has.

Written once: models, optimizers (of sharded ones each rank its part), and registered objects, which accelerate takes
to be the same on every rank (its own `save_state` writes the first process's). Of each rank: schedulers, scaler,
random state, buffers, modes, places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from accelerate_spot import _compat
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch import fits, modules, nested, rng, sharded

_SMALL = 64 << 20
"""Bytes: registered objects and buffers up to here are copied at the end of a pass; averaged weights of a big model
are not."""


def capture(accelerator: Any, stepped: set[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local); tensors are the live ones. `stepped`: numbers of the optimizers that have made the update.

    Collective for a sharded model.
    """
    models = _compat.models(accelerator)
    shared = _weights(accelerator)
    states = shared["models"]
    gradients = _waiting_gradients(accelerator, models, stepped)
    shared["registered"] = [thing.state_dict() for thing in _compat.registered(accelerator)]
    if _compat.shards(accelerator):
        shared["gradients"], gradients = gradients, [{} for _ in models]  # of which each rank has a part
    world_size = int(accelerator.num_processes)
    local = {
        "schedulers": [_compat.wrapped(scheduler).state_dict() for scheduler in _compat.schedulers(accelerator)],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "rng": rng.capture(),
        "buffers": [modules.buffers(model, state, world_size) for model, state in zip(models, states, strict=True)],
        "modes": [modules.modes(model) for model in models],
        "gradients": gradients,
        "micro_step": int(accelerator.step),
        "accumulation": _compat.accumulation(accelerator),
    }
    return shared, local


def template(accelerator: Any) -> dict[str, Any] | None:
    """What a generation is loaded into, for shards; whole tensors are loaded on their own. Collective."""
    if not _compat.shards(accelerator):
        return None
    registered = [_only_shards(thing.state_dict()) for thing in _compat.registered(accelerator)]
    return {**_weights(accelerator), "registered": registered}


def _only_shards(value: Any) -> Any:
    """`value` with None for everything but DTensors, as averages of sharded weights are."""
    if isinstance(value, dict):
        return {key: _only_shards(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_only_shards(item) for item in value)
    return value if isinstance(value, DTensor) else None


def _weights(accelerator: Any) -> dict[str, Any]:
    models, optimizers = _compat.models(accelerator), list(map(_compat.wrapped, _compat.optimizers(accelerator)))
    if not _compat.shards(accelerator):
        return {
            "models": [model.state_dict() for model in models],
            "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        }
    return {
        "models": [sharded.model_state(model) for model in models],
        "optimizers": [sharded.optimizer_state(_model_of(optimizer, models), optimizer) for optimizer in optimizers],
    }


def _model_of(optimizer: torch.optim.Optimizer, models: list[Any]) -> Any:
    """The model that the optimizer trains: its state is named by that model's parameters."""
    return next(model for model in models if modules.trains(optimizer, model))


def _waiting_gradients(accelerator: Any, models: list[Any], stepped: set[int]) -> list[dict[str, Tensor]]:
    """Gradients of parameters whose optimizer has not stepped with the others: they wait for a later update."""
    waiting = {
        id(parameter)
        for number, optimizer in enumerate(_compat.optimizers(accelerator))
        if number not in stepped
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    return [
        {
            name: parameter.grad
            for name, parameter in model.named_parameters()
            if id(parameter) in waiting and parameter.grad is not None
        }
        for model in models
    ]


def restore(accelerator: Any, shared: Mapping[str, Any], local: Mapping[str, Any]) -> None:
    """Everything but random state, modes and places: those come last, see `restore_late`.

    Collective for a sharded model, whose own tensors `shared` has by now.
    """
    models = _compat.models(accelerator)
    optimizers = list(map(_compat.wrapped, _compat.optimizers(accelerator)))
    pairs = {
        "models": (models, shared["models"]),
        "optimizers": (optimizers, shared["optimizers"]),
        "schedulers": ([_compat.wrapped(each) for each in _compat.schedulers(accelerator)], local["schedulers"]),
        "registered objects": (_compat.registered(accelerator), shared["registered"]),
    }
    for what, (present, saved) in pairs.items():
        if len(present) != len(saved):
            raise ResumeMismatchError(
                f"The run was saved with {len(saved)} {what}, and the script has {len(present)} by now. The run was "
                "not changed.",
                hint="Prepare and register the same things, in the same order, before the training loop.",
            )
    in_shards = _compat.shards(accelerator)
    if in_shards:
        for model, state in zip(*pairs.pop("models"), strict=True):
            sharded.put_model_state(model, state)
        for optimizer, state in zip(*pairs.pop("optimizers"), strict=True):
            sharded.put_optimizer_state(_model_of(optimizer, models), optimizer, state)
    for present, saved in pairs.values():
        for thing, state in zip(present, saved, strict=True):
            thing.load_state_dict(state)
    waiting = (shared if in_shards else local)["gradients"]
    for model, buffers, gradients in zip(models, local["buffers"], waiting, strict=True):
        modules.set_buffers(model, buffers)
        parameters = dict(model.named_parameters())
        for name, gradient in gradients.items():
            parameters[name].grad = sharded.as_shard(gradient, parameters[name])
    if local["scaler"] is not None and accelerator.scaler is not None:
        accelerator.scaler.load_state_dict(local["scaler"])


def restore_late(accelerator: Any, local: Mapping[str, Any], *, seed: int, updates: int) -> None:
    """When the script asks for the next batch: nothing of its own comes after this and before that batch.

    seed, updates: what a process that has no random state of its own (`local["rng"]` None) is seeded from.
    """
    for model, modes in zip(_compat.models(accelerator), local["modes"], strict=True):
        modules.set_modes(model, modes)
    accelerator.step = local["micro_step"]
    rng.resume(local["rng"], seed=seed, step=updates, rank=int(accelerator.process_index))


def stable_tensors(accelerator: Any, shared: Mapping[str, Any]) -> list[Tensor]:
    """Tensors that nothing changes before an optimizer steps: parameters and optimizer state, no buffers."""
    parameters = [parameter for model in _compat.models(accelerator) for parameter in model.parameters()]
    return [*parameters, *nested.tensors(shared["optimizers"])]


def frozen_tensors(accelerator: Any) -> list[Tensor]:
    """Tensors that are not expected to change from save to save."""
    return [tensor for model in _compat.models(accelerator) for tensor in modules.frozen(model)]


def expected_bytes(accelerator: Any) -> int:
    """About what this rank's snapshot will take."""
    optimizers = [_compat.wrapped(optimizer) for optimizer in _compat.optimizers(accelerator)]
    models = _compat.models(accelerator)
    ranks = 1 if _compat.shards(accelerator) else int(accelerator.num_processes)
    return sum(
        modules.expected_bytes(model, optimizers if number == 0 else [], ranks)
        for number, model in enumerate(models)
    )


def fingerprint(accelerator: Any) -> str:
    """Of all models, by names and shapes. Collective for a sharded model."""
    in_shards = _compat.shards(accelerator)
    states = [sharded.model_state(model) if in_shards else model for model in _compat.models(accelerator)]
    return "+".join(map(fits.fingerprint, states))


def settled(accelerator: Any, shared: Mapping[str, Any]) -> dict[str, Any]:
    """`shared` for later use: weights by reference, what an evaluation may change as a copy, if small.

    That is registered objects, and buffers: DDP gives every rank the first one's before each forward pass.
    """
    registered = [
        nested.frozen(state) if _small(nested.tensors(state)) else state for state in shared["registered"]
    ]
    models = []
    for model, state in zip(_compat.models(accelerator), shared["models"], strict=True):
        buffers = {name: state[name] for name, _ in model.named_buffers() if name in state}
        models.append({**state, **nested.frozen(buffers)} if _small(buffers.values()) else state)
    return {**shared, "registered": registered, "models": models}


def _small(tensors: Iterable[Tensor]) -> bool:
    return sum(tensor.nbytes for tensor in tensors) <= _SMALL


def weigh(shared: Mapping[str, Any]) -> Tensor:
    """One number per tensor of `shared`; unequal when a value was changed, as by an exchange for averaged weights."""
    sums = [
        tensor.detach().double().sum() if not tensor.is_complex() else tensor.detach().abs().double().sum()
        for tensor in map(nested.local, nested.tensors(dict(shared)))
    ]
    return torch.stack([value.cpu() for value in sums]).nan_to_num() if sums else torch.zeros(0)
