"""Spot tolerance for PyTorch Lightning: add `SpotCallback`, or set SPOT_RUN, and a killed job continues exactly.

Exact means bit for bit, against the same fit uninterrupted: sample ids, losses, events, logged rows, epoch means,
weights, optimizer, schedulers. What is *not* exact, and says so in the log or is refused:

- random augmentation in the workers of a loader that saves its own state (StatefulDataLoader): its workers' generators
  cannot be saved. A plain DataLoader is exact. So is any generator object that a data set keeps for itself.
- an iterable data set that has no state is read again from its beginning: exact when that gives the same items.
- a sampler of one's own that remembers something from epoch to epoch and has neither `state_dict` nor `set_epoch`.
- StochasticWeightAveraging inside an epoch; time-based validation (`val_check_interval` as a time).
- metrics logged with a process group of one's own, and `training_step(dataloader_iter)`, which is refused.
- another number of ranks than the run was saved with: every step has its samples and learning rate, and sums are taken
  in another order. Strategies that spawn or fork, and DeepSpeed, are refused.
- a stop at the very last step of a fit, or after `trainer.should_stop`, lets the fit finish instead.
"""

from __future__ import annotations

from lightning_spot.callback import SpotCallback
from lightning_spot.checkpoint_io import SpotCheckpointIO
from lightning_spot.datamodule import ResumableDataModule
from lightning_spot.spot_fabric import SpotFabric
from lightning_spot.wiring import trainer_kwargs

__all__ = ["ResumableDataModule", "SpotCallback", "SpotCheckpointIO", "SpotFabric", "trainer_kwargs"]
