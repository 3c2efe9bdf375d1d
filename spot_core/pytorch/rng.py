"""Random state of one rank as numbers and tensors: python, numpy, torch on the CPU and on every accelerator device.

`capture` belongs at the save point, `restore` after everything that may draw while a run starts and before the first
batch is fetched (prefetching draws). The state is plain data, so that it is stored and loaded without pickle.

numpy's own `Generator` objects and generators that a user made are theirs to save (`generator.get_state()`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from spot_core.pytorch.streams import CpuRng, mix

__all__ = ["capture", "reseed", "restore", "resume"]

_log = logging.getLogger(__name__)


def capture() -> dict[str, Any]:
    """The state of all global generators. Waits for no device and changes nothing."""
    return {**CpuRng.capture().to_state(), "devices": _capture_devices()}


def restore(state: Mapping[str, Any]) -> None:
    """Put a captured state in place.

    Devices are matched by index, the current one with the one that was current then (a rank may be given another
    device). A generation saved with an accelerator restores what there is on a machine without one; the log says so.
    """
    CpuRng.from_state(state).apply()
    _restore_devices(state["devices"])


def reseed(seed: int, step: int, rank: int) -> None:
    """Seed all global generators from (seed, step, rank): for a rank that has no state of its own to restore.

    When the number of ranks changed, what each rank would have drawn is not defined; this gives every rank its own
    stream, the same one each time the same generation is resumed, and another one than at any other step.
    """
    mixed = mix(seed, step, rank)
    CpuRng.seeded(mixed).apply()
    torch.manual_seed(mixed)  # torch's CPU generator again, and those of all devices


def resume(saved: Mapping[str, Any] | None, *, seed: int, step: int, rank: int) -> None:
    """`restore` what this rank saved; a rank that did not exist then is seeded (`reseed`), and the log says so."""
    if saved is not None:
        restore(saved)
        return
    _log.warning(
        "spot: rank %d has no random state in the generation: its generators are seeded from the run's seed, step %d "
        "and its rank.", rank, step,
    )
    reseed(seed, step, rank)


def _device_module() -> tuple[str, Any] | None:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return None if accelerator is None else (accelerator.type, torch.get_device_module(accelerator))


def _capture_devices() -> dict[str, Any]:
    found = _device_module()
    if found is None:
        return {}
    kind, module = found
    if not hasattr(module, "get_rng_state_all"):  # one device, as on mps
        return {"type": kind, "current": 0, "states": [module.get_rng_state()]}
    if not module.is_initialized():
        # Nothing was drawn there yet; asking would make a context on the device.
        return {}
    return {"type": kind, "current": module.current_device(), "states": list(module.get_rng_state_all())}


def _restore_devices(saved: Mapping[str, Any]) -> None:
    if not saved:
        return
    found = _device_module()
    if found is None or found[0] != saved["type"]:
        here = "no accelerator" if found is None else found[0]
        _log.warning("The random state of %s devices is not restored: this machine has %s.", saved["type"], here)
        return
    module, states = found[1], saved["states"]
    if not hasattr(module, "set_rng_state_all"):
        module.set_rng_state(states[0])
        return
    for index, state in enumerate(states[: module.device_count()]):
        module.set_rng_state(state, index)
    module.set_rng_state(states[saved["current"]], module.current_device())
