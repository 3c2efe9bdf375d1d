"""Spot tolerance for the Transformers `Trainer`: a killed training continues exactly, `trainer.train()` unchanged.

Add `SpotTrainerCallback` to the callbacks, or start the script by `accelerate-spot launch`. Exact means bit for bit,
against the same training uninterrupted: sample ids, losses, logged rows, weights, optimizer, schedule. The Trainer's
own checkpoint files, `save_total_limit` and the best model work as before, and have nothing to do with the run.

What is *not* exact, and is refused or said in the log:

- another number of processes: the samples of each update and the learning rate stay, by gradient accumulation, and what
  each process draws is seeded anew. Data that are not shared out from one order (streams, samples grouped by length),
  and an accumulation that does not divide, are refused.
- DeepSpeed, FSDP, tensor parallelism, TPUs and SageMaker's model parallelism are refused.
- an iterable data set that has no state is read again from its beginning: exact when that gives the same items.
- a callback's memory that is neither `ExportableState` nor has `state_dict` and `load_state_dict`.
- trials of `hyperparameter_search` are left alone.
- a trainer that replaces `train` without calling the one it inherits, and its loop too, is refused.
"""

from __future__ import annotations

from accelerate_spot.trainer.callback import SpotTrainerCallback
from accelerate_spot.trainer.patching import patch

__all__ = ["SpotTrainerCallback", "patch"]
