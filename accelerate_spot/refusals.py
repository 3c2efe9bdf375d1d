"""What cannot work is said before anything is trained, with the reason and the way out."""

from __future__ import annotations

import os
from typing import Any

from accelerate_spot import _compat
from spot_core.errors import ConfigError

OLD_FSDP = "accelerate_spot does not support version 1 of FSDP, only version 2 (fully_shard)."
OLD_FSDP_HINT = "Set fsdp_version: 2 (in fsdp_config, or FullyShardedDataParallelPlugin(fsdp_version=2))."


def check_accelerator(accelerator: Any, run: str) -> None:
    """Raises ConfigError. When the accelerator is made."""
    _compat.check_version()
    if _compat.wraps_in_fsdp(accelerator):
        raise ConfigError(OLD_FSDP, hint=OLD_FSDP_HINT)
    if not _compat.supported_kind(accelerator):
        raise ConfigError(
            f"accelerate_spot does not support {accelerator.distributed_type}: it drives the model itself.",
            hint="Use one process, DDP (MULTI_GPU, MULTI_CPU), or FSDP with fsdp_version: 2.",
        )
    if _compat.splits_layers(accelerator):
        raise ConfigError(
            "accelerate_spot does not support tensor, context or sequence parallelism: its places in the data are "
            "those of processes that each have batches of their own.",
            hint="Leave tp_size, cp_size and sp_size of the parallelism_config at 1.",
        )
    started = int(os.environ.get("WORLD_SIZE", "1") or 1)
    if started > 1 and accelerator.num_processes == 1:
        raise ConfigError(
            f"{started} processes were started, and accelerate treats each as a training of its own: they would all "
            f"write to the run {run}.",
            hint="On machines without accelerators set use_cpu: true in the YAML (ACCELERATE_USE_CPU=true).",
        )
    if accelerator.project_configuration.total_limit is not None:
        raise ConfigError(
            "ProjectConfiguration(total_limit=...) deletes older checkpoints before the new one is written: a kill in "
            "between leaves none.",
            hint="Leave it out. The run keeps its own generations: keep in spot_config.",
        )
    check_even_batches(accelerator, accelerator.even_batches)


def check_even_batches(accelerator: Any, even_batches: bool) -> None:
    """Raises ConfigError where processes would come by different numbers of batches."""
    if not even_batches and accelerator.num_processes > 1:
        raise ConfigError(
            "even_batches=False gives the processes different numbers of batches: they could not agree on a step to "
            "save and stop at.",
            hint="Leave even_batches at True, or use drop_last=True in the DataLoader.",
        )


def check_prepared(accelerator: Any) -> None:
    """Raises ConfigError. When the first loop begins."""
    if not _compat.models(accelerator):
        raise ConfigError(
            "no model was prepared: accelerate_spot saves what accelerator.prepare was given.",
            hint="Give the model to accelerator.prepare together with the optimizer.",
        )
