"""A process that is as if no Accelerator had been made in it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from accelerate.state import AcceleratorState, GradientState

from accelerate_spot import attaching


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _reset()
    monkeypatch.setattr(attaching, "_job", None)
    yield
    if attaching.attached():
        attaching.current().close()
    _reset()


def _reset() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
