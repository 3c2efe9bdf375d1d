"""A notice is a fact: this machine will, or may, be taken. What was done about it is kept elsewhere."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any


class NoticeKind(str, enum.Enum):
    """What a notice says."""

    ADVISORY = "advisory"
    """The machine may be taken: save early, go on training."""
    PREEMPTION = "preemption"
    """The machine is being taken."""
    MAINTENANCE = "maintenance"
    """The provider will stop or restart the machine."""
    TIME_LIMIT = "time_limit"
    """The scheduler ends the job at the deadline."""
    CANCELLED = "cancelled"
    """An earlier notice with the same id no longer holds."""


_STOPPING = frozenset({NoticeKind.PREEMPTION, NoticeKind.MAINTENANCE, NoticeKind.TIME_LIMIT})


@dataclass(frozen=True)
class Notice:
    """One notice from one source.

    ``id`` is the same every time the same notice is seen, also from another process; ``deadline`` is unix seconds,
    None when the source names none. A cancellation is a notice too: it carries the id of the one it takes back.
    """

    id: str
    kind: NoticeKind
    source: str
    deadline: float | None = None
    detail: str = ""

    @property
    def stops(self) -> bool:
        """Whether training has to end by the deadline (an advisory or a cancelled notice does not ask for that)."""
        return self.kind in _STOPPING

    def remaining_s(self, now: float) -> float | None:
        """Seconds left at unix time ``now``, negative when past, None without a deadline."""
        return None if self.deadline is None else self.deadline - now

    def cancelled(self, detail: str) -> Notice:
        """The notice that takes this one back."""
        return replace(self, kind=NoticeKind.CANCELLED, deadline=None, detail=detail)

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "kind": self.kind.value,
            "source": self.source,
            "deadline": self.deadline,
            "detail": self.detail,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Notice:
        """Read what ``to_json`` wrote.

        Raises ValueError when a field is missing, of the wrong type, or names an unknown kind.
        """
        try:
            deadline = value.get("deadline")
            return cls(
                id=str(value["id"]),
                kind=NoticeKind(value["kind"]),
                source=str(value["source"]),
                deadline=None if deadline is None else float(deadline),
                detail=str(value.get("detail", "")),
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"not a notice: {value!r} ({error!r})") from error
