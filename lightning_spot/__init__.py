"""Spot tolerance for PyTorch Lightning: add `SpotCallback`, or set SPOT_RUN, and a killed job continues exactly."""

from __future__ import annotations

from lightning_spot.callback import SpotCallback
from lightning_spot.checkpoint_io import SpotCheckpointIO
from lightning_spot.datamodule import ResumableDataModule
from lightning_spot.wiring import trainer_kwargs

__all__ = ["ResumableDataModule", "SpotCallback", "SpotCheckpointIO", "trainer_kwargs"]
