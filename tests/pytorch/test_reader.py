"""A plain torch.distributed.checkpoint user reads a generation, and gets what DCP itself would have given."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint import CheckpointException
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, TensorStorageMetadata

from spot_core.errors import NoGenerationError
from spot_core.pytorch import SpotStorageReader
from spot_core.run import Run

from .same import same
from .saving import Saver, save_one

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def trained() -> dict[str, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    module(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return {
        "model": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "nan": float("nan"),
        "history": [1.0, 2.0, None],
        "nested": {"list": [{"a": 1, "t": torch.ones(2)}], "tuple": (1, torch.zeros(1))},
        "array": np.arange(4.0),
    }


def emptied(value: Any) -> Any:
    """The same structure, with other values in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value)
    if isinstance(value, dict):
        return type(value)((key, emptied(item)) for key, item in value.items())
    if isinstance(value, list):
        return [emptied(item) for item in value]
    return None


def test_dcp_load_gives_what_dcp_save_would_have_given(tmp_path: Path) -> None:
    state = trained()
    run = Run.open(tmp_path / "run")
    save_one(run, state)
    dcp.save(trained(), storage_writer=dcp.FileSystemWriter(tmp_path / "stock"))
    ours, stock = emptied(state), emptied(state)
    dcp.load(ours, storage_reader=SpotStorageReader(tmp_path / "run"))
    dcp.load(stock, storage_reader=dcp.FileSystemReader(tmp_path / "stock"))
    assert same(ours, stock)
    assert same(ours, state)


def test_part_of_a_state_can_be_read_and_stateful_objects_take_it_in(tmp_path: Path) -> None:
    save_one(Run.open(tmp_path), trained())
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    dcp.load({"model": module}, storage_reader=SpotStorageReader(tmp_path))
    assert same(dict(module.state_dict()), dict(trained()["model"]))


def test_metadata_lists_tensors_and_values_and_each_ranks_own(tmp_path: Path) -> None:
    weight = torch.zeros(2, 3, dtype=torch.bfloat16)
    save_one(Run.open(tmp_path), {"a": weight, "b": weight, "n": 1}, {"rng": torch.zeros(5), "step": 2})
    found = SpotStorageReader(tmp_path).read_metadata().state_dict_metadata
    assert {name for name, entry in found.items() if isinstance(entry, TensorStorageMetadata)} == {
        "a",
        "b",
        "rank00000.rng",
    }
    assert {name for name, entry in found.items() if isinstance(entry, BytesStorageMetadata)} == {"n", "rank00000.step"}
    assert (found["b"].size, found["b"].properties.dtype) == (torch.Size([2, 3]), torch.bfloat16)


def test_generations_by_name_and_by_age(tmp_path: Path) -> None:
    run = Run.open(tmp_path)
    saver = Saver(run)
    for step in (1, 2):
        saver.save(step, {"t": torch.full((2,), float(step)), "step": step})
    saver.close()
    for wanted, step in ((None, 2), ("000001-000000000001", 1)):
        state = {"t": torch.zeros(2), "step": 0}
        dcp.load(state, storage_reader=SpotStorageReader(run, wanted))
        assert same(state, {"t": torch.full((2,), float(step)), "step": step})
    state = {"step": 0}
    dcp.load(state, checkpoint_id="000001-000000000001", storage_reader=SpotStorageReader(run))
    assert state == {"step": 1}
    with pytest.raises(NoGenerationError, match=r"000001-000000000009.*000001-000000000002"):
        SpotStorageReader(run, "000001-000000000009").read_metadata()
    with pytest.raises(NoGenerationError):
        SpotStorageReader(tmp_path / "nothing").read_metadata()


def test_damage_stops_the_load(tmp_path: Path) -> None:
    save_one(Run.open(tmp_path), {"t": torch.ones(100)})
    blob = next(tmp_path.glob("generations/*/*.blob"))
    data = bytearray(blob.read_bytes())
    data[7] ^= 1
    blob.write_bytes(data)
    with pytest.raises(CheckpointException, match="CorruptShardError"):
        dcp.load({"t": torch.zeros(100)}, storage_reader=SpotStorageReader(tmp_path))


def test_nothing_of_the_generation_is_unpickled_to_describe_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_one(Run.open(tmp_path), trained())

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    metadata = SpotStorageReader(tmp_path).read_metadata()
    assert "optimizer.param_groups.0.lr" in metadata.state_dict_metadata
