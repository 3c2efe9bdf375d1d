"""Lightning's signal handling, kept from doing harm while a fit trains.

Lightning's own SIGTERM handler runs a collective inside the handler and lets the process end with code 0.
"""

from __future__ import annotations

from typing import Any


class Stopping:
    """Takes the signal over when training starts; gives it back on `close`."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def sanity_check_starts(self) -> None:
        """Lightning has just registered its handlers; the sanity check may take long."""

    def training_starts(self) -> None:
        """The same, for a fit without a sanity check."""

    def close(self) -> None:
        """Idempotent."""
