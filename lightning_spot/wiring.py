"""Everything for a Trainer in one call, for scripts that build theirs from keywords."""

from __future__ import annotations

import os
from typing import Any

from lightning_spot.callback import SpotCallback
from lightning_spot.checkpoint_io import SpotCheckpointIO


def trainer_kwargs(
    run: str | os.PathLike[str] | None = None, *, checkpoint_io: bool = False, **settings: Any
) -> dict[str, Any]:
    """Keywords for `Trainer(**trainer_kwargs("s3://bucket/run1", interval="10min"))`.

    run, settings: as for `SpotCallback`. With `checkpoint_io` Lightning's own checkpoints go through the same engine.
    Returns ``callbacks`` and, with `checkpoint_io`, ``plugins``; add your own to the lists.
    """
    keywords: dict[str, Any] = {"callbacks": [SpotCallback(run, **settings)]}
    if checkpoint_io:
        options = settings.get("storage_options")
        keywords["plugins"] = [SpotCheckpointIO(storage_options=options)]
    return keywords
