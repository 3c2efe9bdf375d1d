"""Small trainings on few cores: one torch thread, no run of the surrounding shell, every start a new process."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from spot_core.pytorch import fits

# Libraries that write or ask somewhere when they find out that they can.
os.environ.update({"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true", "TOKENIZERS_PARALLELISM": "false"})


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("SPOT_")]:
        monkeypatch.delenv(name)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    fits._returned.clear()
    yield
    fits._returned.clear()
    torch.set_num_threads(threads)
