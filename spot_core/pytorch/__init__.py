"""The torch part of the core: states taken apart and put together, saved by every rank, loaded resharded."""

from __future__ import annotations

from spot_core.pytorch.reader import SpotStorageReader

__all__ = ["SpotStorageReader"]
