"""Opening the run that a command is about, with the storage options of the environment."""

from __future__ import annotations

import os

from spot_core.config import Settings
from spot_core.run import Run


def open_run(run: str) -> Run:
    """No effect. ``SPOT_STORAGE_OPTIONS`` are for stores elsewhere: a folder has none."""
    local = "://" not in run or run.split("://", 1)[0].lower() in ("file", "local", "memory")
    variable = "SPOT_STORAGE_OPTIONS"
    options = None if local else Settings.from_env({variable: os.environ.get(variable, "")}).storage_options
    return Run.open(run, storage_options=options)
