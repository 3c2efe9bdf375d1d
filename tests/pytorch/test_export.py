"""What others read of an export equals what was saved; damage, pickles and existing files are handled."""

from __future__ import annotations

import collections
import datetime
import json
import pathlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from spot_core.digest import CHUNK_SIZE
from spot_core.errors import ConfigError, CorruptShardError, NoGenerationError
from spot_core.pytorch import export as export_module
from spot_core.pytorch.export import export
from spot_core.run import Run

from .same import same
from .saving import save_one
from .test_state import Colour, Opaque, Pair

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def state() -> dict[str, Any]:
    torch.manual_seed(0)
    weight = torch.randn(5, 4)
    return {
        "state_dict": collections.OrderedDict(
            {"embed.weight": weight, "head.weight": weight, "steps": torch.tensor(7), "half": torch.ones(3).bfloat16()}
        ),
        "optimizer": [{"state": {0: {"exp_avg": torch.randn(5, 4), "step": torch.tensor(1.0)}}, "lr": 0.1}],
        "epoch": 3,
        "big": torch.randn(CHUNK_SIZE // 4 + 10),
        "image": torch.randn(1, 2, 3, 4).to(memory_format=torch.channels_last),
    }


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run.open(tmp_path / "run")
    save_one(run, state(), {"rng": torch.zeros(3)})
    return run


def test_torch_file_loads_with_weights_only(run: Run, tmp_path: Path) -> None:
    export(run, None, tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=True), state())


def test_torch_file_keeps_the_ties(run: Run, tmp_path: Path) -> None:
    export(run, "000001-000000000001", tmp_path / "out.pt", "torch", prefix="state_dict.")
    weights = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(weights, state()["state_dict"])
    assert weights["embed.weight"].data_ptr() == weights["head.weight"].data_ptr()


@pytest.mark.parametrize("whole", [True, False], ids=["one file", "file per tensor"])
def test_dcp_folder_is_read_by_stock_dcp(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: bool
) -> None:
    if not whole:
        monkeypatch.setattr(export_module, "_IN_MEMORY_BYTES", 0)
        monkeypatch.setattr(export_module, "_BATCH_BYTES", 64)
    export(run, None, tmp_path / "out", "dcp")
    assert (len(list((tmp_path / "out").glob("*.distcp"))) == 1) == whole
    into = state()
    for tensor in (
        into["big"],
        into["image"],
        *into["state_dict"].values(),
        *into["optimizer"][0]["state"][0].values(),
    ):
        tensor.zero_()
    into["epoch"] = into["optimizer"][0]["lr"] = 0
    dcp.load(into, storage_reader=dcp.FileSystemReader(tmp_path / "out"))
    assert same(into, state())
    dcp_to_torch_save(tmp_path / "out", tmp_path / "out.pt")
    assert same(torch.load(tmp_path / "out.pt", weights_only=False)["big"], state()["big"])


def test_safetensors_file_holds_the_tensors_by_name_and_names_the_tied(run: Run, tmp_path: Path) -> None:
    export(run, None, tmp_path / "all.safetensors", "safetensors")
    saved = state()
    weights = dict(saved["state_dict"])
    moments = saved["optimizer"][0]["state"][0]
    expected = {f"state_dict.{name}": tensor for name, tensor in weights.items() if name != "head.weight"} | {
        "big": saved["big"],
        "image": saved["image"],
        "optimizer.0.state.0.exp_avg": moments["exp_avg"],
        "optimizer.0.state.0.step": moments["step"],
    }
    found = load_file(tmp_path / "all.safetensors")
    assert found.keys() == expected.keys()
    assert all(same(found[name], tensor) for name, tensor in expected.items())

    export(run, None, tmp_path / "weights.safetensors", "safetensors", prefix="state_dict.")
    with safe_open(tmp_path / "weights.safetensors", "pt") as file:
        assert set(file.keys()) == {"embed.weight", "steps", "half"}
        assert file.metadata() == {"format": "pt", "head.weight": "embed.weight"}


def test_values_that_weights_only_does_not_know_become_plain(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run")
    rich = {
        "path": pathlib.PurePosixPath("/a"),
        "when": datetime.date(2024, 1, 2),
        "colour": Colour.RED,
        "pair": Pair(1, torch.ones(1)),
        "queue": collections.deque([1, 2]),
        "default": collections.defaultdict(list, {"a": [1]}),
        "array": np.arange(3, dtype=">i2"),
        "text": np.array(["a", "b"]),
        "scalar": np.float32(1.5),
        "sets": {frozenset({1})},
        "object": Opaque(1),
    }
    save_one(run, rich, allow_pickle=True)
    export(run, None, tmp_path / "out.pt")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert same(
        found,
        {
            "path": "/a",
            "when": "2024-01-02",
            "colour": 1,
            "pair": (1, torch.ones(1)),
            "queue": [1, 2],
            "default": {"a": [1]},
            "array": torch.arange(3, dtype=torch.int16),
            "text": ["a", "b"],
            "scalar": 1.5,
            "sets": {(1,)},
        },
    )
    export(run, None, tmp_path / "trusted.pt", allow_pickle=True)
    assert torch.load(tmp_path / "trusted.pt", weights_only=False)["object"].value == 1


@pytest.mark.parametrize("fmt", ["dcp", "torch", "safetensors"])
def test_damage_leaves_nothing_behind(run: Run, tmp_path: Path, fmt: str) -> None:
    blob = next((tmp_path / "run").glob("generations/*/*.blob"))
    data = bytearray(blob.read_bytes())
    data[CHUNK_SIZE // 2] ^= 1
    blob.write_bytes(data)
    (tmp_path / "there").mkdir()
    with pytest.raises(CorruptShardError, match="chunk 0"):
        export(run, None, tmp_path / "there" / "out", fmt)
    assert list((tmp_path / "there").iterdir()) == []


def test_bad_arguments_are_told_before_anything_is_written(run: Run, tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    for arguments, error, match in (
        ({"out": tmp_path / "taken"}, ConfigError, "exists"),
        ({"out": tmp_path / "x", "fmt": "onnx"}, ConfigError, "safetensors"),
        ({"out": tmp_path / "x", "prefix": "state_dict.nothing"}, ConfigError, r"nothing.*embed\.weight"),
        ({"out": tmp_path / "x", "generation": "000009-000000000001"}, NoGenerationError, "000009"),
    ):
        with pytest.raises(error, match=match):
            export(**{"run": run, "generation": None, **arguments})
    assert (tmp_path / "taken").read_text() == "mine"
    assert not (tmp_path / "x").exists()


def test_the_tree_alone_can_be_exported(tmp_path: Path) -> None:
    run = Run.open(tmp_path / "run")
    save_one(run, {"a": {"b": [1, 2]}})
    export(run, None, tmp_path / "out.pt", prefix="a.b")
    assert json.dumps(torch.load(tmp_path / "out.pt", weights_only=True)) == "[1, 2]"
