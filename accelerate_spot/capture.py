"""The state of a training, taken apart for the session and put back: what is written once, what each rank has.

Written once: models, optimizers, and registered objects, which accelerate takes to be the same on every rank (its own
`save_state` writes the first process's). Of each rank: schedulers, scaler, random state, buffers, modes, places.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from accelerate_spot import _compat
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch import fits, modules, nested, rng

_SMALL = 64 << 20
"""Bytes: registered objects and buffers up to here are copied at the end of a pass; averaged weights of a big model
are not."""


def capture(accelerator: Any, stepped: set[int]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(shared, local); tensors are the live ones. `stepped`: numbers of the optimizers that have made the update."""
    models = _compat.models(accelerator)
    states = [model.state_dict() for model in models]
    shared = {
        "models": states,
        "optimizers": [_compat.wrapped(optimizer).state_dict() for optimizer in _compat.optimizers(accelerator)],
        "registered": [thing.state_dict() for thing in _compat.registered(accelerator)],
    }
    world_size = int(accelerator.num_processes)
    local = {
        "schedulers": [_compat.wrapped(scheduler).state_dict() for scheduler in _compat.schedulers(accelerator)],
        "scaler": None if accelerator.scaler is None else accelerator.scaler.state_dict(),
        "rng": rng.capture(),
        "buffers": [modules.buffers(model, state, world_size) for model, state in zip(models, states, strict=True)],
        "modes": [modules.modes(model) for model in models],
        "gradients": _waiting_gradients(accelerator, models, stepped),
        "micro_step": int(accelerator.step),
        "accumulation": _compat.accumulation(accelerator),
    }
    return shared, local


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
    """Everything but random state, modes and places: those come last, see `restore_late`."""
    models = _compat.models(accelerator)
    pairs = {
        "models": (models, shared["models"]),
        "optimizers": ([_compat.wrapped(each) for each in _compat.optimizers(accelerator)], shared["optimizers"]),
        "schedulers": ([_compat.wrapped(each) for each in _compat.schedulers(accelerator)], local["schedulers"]),
        "registered objects": (_compat.registered(accelerator), shared["registered"]),
    }
    for what, (present, saved) in pairs.items():
        if len(present) != len(saved):
            raise ResumeMismatchError(
                f"The run was saved with {len(saved)} {what}, and the script has {len(present)} by now. Nothing was "
                "changed.",
                hint="Prepare and register the same things, in the same order, before the training loop.",
            )
    for present, saved in pairs.values():
        for thing, state in zip(present, saved, strict=True):
            thing.load_state_dict(state)
    for model, buffers, gradients in zip(models, local["buffers"], local["gradients"], strict=True):
        modules.set_buffers(model, buffers)
        parameters = dict(model.named_parameters())
        for name, gradient in gradients.items():
            parameters[name].grad = gradient.to(parameters[name].device)
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
    return sum(
        modules.expected_bytes(model, optimizers if number == 0 else [], int(accelerator.num_processes))
        for number, model in enumerate(models)
    )


def fingerprint(accelerator: Any) -> str:
    """Of all models, by names and shapes."""
    return "+".join(fits.fingerprint(model) for model in _compat.models(accelerator))


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
        for tensor in nested.tensors(dict(shared))
    ]
    return torch.stack([value.cpu() for value in sums]).nan_to_num() if sums else torch.zeros(0)
