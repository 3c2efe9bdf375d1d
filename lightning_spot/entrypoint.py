"""Entry point of Lightning (`callbacks_factory`): the variable SPOT_RUN alone adds the callback to every Trainer."""

from __future__ import annotations

import os
from typing import Any


def callbacks() -> list[Any]:
    """`[SpotCallback()]` when SPOT_RUN is set, else nothing; called by every `Trainer(...)`."""
    if not os.environ.get("SPOT_RUN", "").strip():
        return []
    from lightning_spot.callback import SpotCallback  # only now: programs without SPOT_RUN pay nothing

    return [SpotCallback()]
