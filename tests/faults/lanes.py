"""Which of the kinds of a fault the fast lane tries."""

from __future__ import annotations

from collections.abc import Iterable

import pytest


def some(kinds: Iterable[str], *fast: str) -> list[object]:
    """All `kinds` as parameters, those not in `fast` in the slow lane only."""
    return [pytest.param(kind, marks=() if kind in fast else pytest.mark.slow) for kind in kinds]
