"""The only file that imports accelerate for a training (the launcher's part is `launch/_compat.py`).

Private names are read through functions here, each of which says what for. Supported: 1.10 to 1.x.
tests/accelerate/test_compat.py fails when one of the names vanishes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate
import torch
from accelerate import data_loader as _data_loader
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DistributedType, broadcast_object_list, extract_model_from_parallel

from spot_core.errors import ConfigError

SUPPORTED = ((1, 10), (2, 0))

VERSION = str(accelerate.__version__)


def check_version(version: str = VERSION) -> None:
    """Raises ConfigError outside of 1.10 to 1.x."""
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not SUPPORTED[0] <= numbers < SUPPORTED[1]:
        raise ConfigError(
            f"accelerate {version} is not supported: accelerate_spot knows 1.10 to 1.x.",
            hint="Install a version in this range.",
        )


def accelerator_class() -> type[Any]:
    cls: type[Any] = accelerate.Accelerator
    return cls


def optimizer_class() -> type[Any]:
    return AcceleratedOptimizer


def loader_classes() -> tuple[type[Any], ...]:
    """What `prepare` makes of a DataLoader; both read one step ahead and say so in `end_of_dataloader`."""
    return (_data_loader.DataLoaderShard, _data_loader.DataLoaderDispatcher)


def dispatches(loader: Any) -> bool:
    """Whether the first process reads for all."""
    return isinstance(loader, _data_loader.DataLoaderDispatcher)


def splits_batches(loader: Any) -> bool:
    """Whether each of the script's batches is cut up for the processes."""
    return bool(getattr(loader.batch_sampler, "split_batches", False))


def skip_inside(loader: Any, make: Callable[[Any], Any]) -> Any:
    """`make(batch_sampler)` in the place of the script's batch sampler, below what cuts it for the processes.

    Only with several processes: the DataLoader of a single one holds the script's own, and forbids to exchange it.
    """
    shard = loader.batch_sampler
    if not isinstance(shard.batch_sampler, type(make(shard.batch_sampler))):
        shard.batch_sampler = make(shard.batch_sampler)
    return shard.batch_sampler


def _innermost_sampler(loader: Any) -> Any:
    """The script's own sampler, below batch samplers (accelerate's `get_sampler` does not look below its own one)."""
    found = loader.batch_sampler if loader.batch_sampler is not None else loader.sampler
    while (inner := getattr(found, "batch_sampler", None) or getattr(found, "sampler", None)) is not None:
        found = inner
    return found


def own_generator(loader: Any) -> bool:
    """Whether the script gave its sampler a generator; asked before `prepare`, which may give it one."""
    return getattr(getattr(loader, "sampler", None), "generator", None) is not None


def forget_generator(loader: Any) -> None:
    """Take away the generator that `prepare` gave the sampler: orders would depend on the number of processes."""
    sampler = _innermost_sampler(loader)
    given = getattr(loader, "synchronized_generator", None)
    if sampler is not None and given is not None and getattr(sampler, "generator", None) is given:
        sampler.generator = None
        loader.synchronized_generator = None
        loader.rng_types = [kind for kind in loader.rng_types if kind != "generator"]


# -- what was prepared ------------------------------------------------------------------------------------------------
# accelerate has no public way to ask for it; its own save_state reads the same lists.


def models(accelerator: Any) -> list[Any]:
    """The prepared models, without what was put around them (DDP, `torch.compile`): names stay what the user gave."""
    return [
        extract_model_from_parallel(model, keep_fp32_wrapper=True, keep_torch_compile=False)
        for model in accelerator._models
    ]


def optimizers(accelerator: Any) -> list[Any]:
    """The prepared optimizers, in accelerate's wrapper."""
    return list(accelerator._optimizers)


def schedulers(accelerator: Any) -> list[Any]:
    return list(accelerator._schedulers)


def loaders(accelerator: Any) -> list[Any]:
    return list(accelerator._dataloaders)


def registered(accelerator: Any) -> list[Any]:
    """What the script gave to `register_for_checkpointing`."""
    return list(accelerator._custom_objects)


def wrapped(prepared: Any) -> Any:
    """The user's own optimizer or scheduler inside of accelerate's wrapper."""
    for name in ("optimizer", "scheduler"):
        inner = getattr(prepared, name, None)
        if inner is not None:
            return inner
    return prepared


# -- the run ----------------------------------------------------------------------------------------------------------


def supported_kind(accelerator: Any) -> bool:
    """One process, DDP or FSDP2: the optimizer that the script made is the one that steps."""
    kind = accelerator.distributed_type
    plain = kind == DistributedType.NO or (kind.value.startswith("MULTI_") and kind != "MULTI_XLA")
    return plain or shards(accelerator)


def shards(accelerator: Any) -> bool:
    """Whether the model is sharded, by `fully_shard`."""
    return bool(accelerator.is_fsdp2)


def wraps_in_fsdp(accelerator: Any) -> bool:
    """Whether the model is sharded by the older wrapper, `FullyShardedDataParallel`."""
    return bool(accelerator.distributed_type == DistributedType.FSDP and not accelerator.is_fsdp2)


def splits_layers(accelerator: Any) -> bool:
    """Whether some processes share a batch: tensor, context or sequence parallelism."""
    config = accelerator.parallelism_config
    return config is not None and int(config.non_data_parallel_size) > 1


def from_first(value: Any) -> Any:
    """Collective: rank 0's value."""
    box = [value]
    broadcast_object_list(box, from_process=0)
    return box[0]


def seedable_sampler(loader: Any) -> Any:
    """The sampler whose order is f(initial_seed + epoch); None when the loader has none."""
    sampler = _innermost_sampler(loader)
    return sampler if isinstance(sampler, _data_loader.SeedableRandomSampler) else None


def schedule_is_over(scheduler: Any) -> bool:
    """Whether a schedule of fixed length has had all its steps: one more raises (OneCycleLR).

    Why private: torch counts the steps in `_step_count`, and accelerate asks it there too.
    """
    inner = scheduler.scheduler
    return hasattr(inner, "total_steps") and inner._step_count > inner.total_steps


def accumulation(accelerator: Any) -> int:
    return int(accelerator.gradient_accumulation_steps)


def initial_seed() -> int:
    return int(torch.initial_seed()) % 2**62
