"""Shipped test tools: contract suites for stores and sources of one's own, stores that fail on purpose, a clock to turn
by hand. The contract suites need pytest, which is imported with them only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spot_core.testing.clock import FakeClock
from spot_core.testing.stores import (
    CRASH_MODES,
    CrashingStore,
    FailingStore,
    LostReplyStore,
    SimulatedCrash,
    SlowStore,
    StoreWrapper,
)

if TYPE_CHECKING:
    from spot_core.testing.store_contract import StoreContract

__all__ = [
    "CRASH_MODES",
    "CrashingStore",
    "FailingStore",
    "FakeClock",
    "LostReplyStore",
    "SimulatedCrash",
    "SlowStore",
    "StoreContract",
    "StoreWrapper",
]


def __getattr__(name: str) -> Any:
    if name == "StoreContract":
        from spot_core.testing.store_contract import StoreContract

        return StoreContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
