"""Methods replaced on single objects, and put back: the objects outlive the fit that needed it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)


class Patches:
    """Replacements of bound methods on instances; `undo` puts back what was there, last first."""

    def __init__(self) -> None:
        self._done: list[tuple[Any, str, Any, bool]] = []

    def around(self, owner: Any, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """Let `owner.name` be `make(original)` until `undo`."""
        original = getattr(owner, name)
        replacement = make(original)
        self._done.append((owner, name, vars(owner).get(name), name in vars(owner)))
        setattr(owner, name, replacement)

    def undo(self) -> None:
        """Idempotent."""
        while self._done:
            owner, name, before, was_there = self._done.pop()
            if was_there:
                setattr(owner, name, before)
            else:
                vars(owner).pop(name, None)
