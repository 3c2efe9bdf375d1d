"""What is refused before anything is touched, with the reason and the way out."""

from __future__ import annotations

from typing import Any

from spot_core.errors import ConfigError

_PLAIN = {"NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA", "MULTI_XPU"}
"""Members of accelerate's DistributedType with a whole model on each process."""


def check_arguments(args: Any) -> None:
    """TrainingArguments that cannot be combined with a run. Raises ConfigError."""
    if getattr(args, "enable_jit_checkpoint", False):
        raise ConfigError(
            "enable_jit_checkpoint=True takes SIGTERM for itself: its ranks do not agree on a step, the script goes on "
            "after the save as if it had finished, and its checkpoint is not exact.",
            hint="Leave enable_jit_checkpoint out: a notice makes SpotTrainerCallback save on all ranks and leave.",
        )


def check_trainer(trainer: Any) -> None:
    """Kinds of training whose state is not whole on each process. Raises ConfigError."""
    check_arguments(trainer.args)
    kind = trainer.accelerator.distributed_type.name
    sharded = next((what for what, is_so in _sharded(trainer).items() if is_so), None)
    if sharded is None and kind not in _PLAIN:
        sharded = kind
    if sharded is not None:
        raise ConfigError(
            f"SpotTrainerCallback does not support {sharded}: the model is not whole on each process, and sharded "
            "models are not resumed by this version.",
            hint="Train on one device or with plain data parallelism (DDP).",
        )


def _sharded(trainer: Any) -> dict[str, bool]:
    return {
        "DeepSpeed": bool(trainer.is_deepspeed_enabled),
        "FSDP": bool(trainer.is_fsdp_enabled or trainer.is_fsdp_xla_enabled),
        "a model that is sharded when it is loaded": bool(trainer.is_distributed_loading_by_transformers),
        "tensor parallelism": trainer.get_tp_size() > 1,
        "context parallelism": trainer.get_cp_size() > 1,
        "sequence parallelism": trainer.get_sp_size() > 1,
    }
