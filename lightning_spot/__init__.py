"""Spot tolerance for PyTorch Lightning: add `SpotCallback`, or set SPOT_RUN, and a killed job continues exactly."""

from __future__ import annotations

from lightning_spot.callback import SpotCallback

__all__ = ["SpotCallback"]
