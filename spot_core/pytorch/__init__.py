"""The torch part of the core: states taken apart and put together, saved by every rank, loaded resharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from spot_core.pytorch.reader import SpotStorageReader

__all__ = ["SpotStorageReader"]


def __getattr__(name: str) -> Any:
    # Loaded when asked for: DataLoader workers that are spawned import this package, and have no use for DCP.
    if name == "SpotStorageReader":
        from spot_core.pytorch.reader import SpotStorageReader

        return SpotStorageReader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
