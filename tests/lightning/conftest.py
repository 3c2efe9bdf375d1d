"""Small fits on few cores: one torch thread, quiet Lightning, no run of the surrounding shell."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("SPOT_RUN", "SPOT_INTERVAL", "SPOT_KEEP"):
        monkeypatch.delenv(name, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    yield
    torch.set_num_threads(threads)
