"""What to do at a step boundary: continue, save, drain the save in flight, stop. Pure: no clock, no store, no thread."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Kind(enum.Enum):
    """The verbs a decision can ask for."""

    CONTINUE = "continue"
    SAVE = "save"
    DRAIN = "drain"
    """Stop: let the save in flight finish, start none."""
    STOP_SAVE = "stop_save"
    """Stop: save this step first."""
    STOP_NOW = "stop_now"
    """Stop: no save can finish any more (or none may be tried)."""

    @property
    def stops(self) -> bool:
        return self in (Kind.DRAIN, Kind.STOP_SAVE, Kind.STOP_NOW)


@dataclass(frozen=True)
class Decision:
    """One decision for one boundary.

    `reason` is a sentence for the log and the stop record. `deadline` (unix s) is when the machine is expected to go;
    None without one.
    """

    kind: Kind
    reason: str = ""
    deadline: float | None = None


CONTINUE = Decision(Kind.CONTINUE)
