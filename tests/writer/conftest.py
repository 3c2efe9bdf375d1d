from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from spot_core.pytorch.stage import Stager
from spot_core.store import Store, open_store
from spot_core.writer import WriterClient


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "run")


@pytest.fixture(params=["process", "thread"])
def client(request: pytest.FixtureRequest, store: Store) -> Iterator[WriterClient]:
    client = WriterClient.start(store, mode=request.param)
    yield client
    client.close()


@pytest.fixture
def stager(client: WriterClient) -> Iterator[Stager]:
    stager = Stager(client)
    yield stager
    stager.close()
