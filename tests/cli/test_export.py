"""export: a generation that a training wrote, in the three formats; what was written is what was saved."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from typer.testing import Result

from spot_core.config import Settings
from spot_core.pytorch.session import Session
from spot_core.run import Run

Spot = Callable[..., Result]
WEIGHT = torch.arange(6.0).reshape(2, 3)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@pytest.fixture
def trained(tmp_path: Path) -> Run:
    run = Run.open(tmp_path / "run")
    with Session(run, Settings(interval="1000 steps", sources="none", writer="thread")) as session:
        session.resume()
        session.start()
        for step in (1, 2):
            session.save(step, shared={"state_dict": {"w": WEIGHT * step}, "epoch": step}, local={}, wait=True)
    return run


def test_torch_file_of_the_newest(trained: Run, spot: Spot, tmp_path: Path) -> None:
    done = spot("export", trained.uri, "--out", tmp_path / "out.pt", "--json")
    assert done.exit_code == 0, done.stderr
    value = json.loads(done.stdout)
    assert sorted(value) == ["format", "generation", "out", "run"]
    assert value["generation"] == "000001-000000000002"
    loaded = torch.load(tmp_path / "out.pt", weights_only=True)
    assert loaded["epoch"] == 2
    assert torch.equal(loaded["state_dict"]["w"], WEIGHT * 2)


def test_safetensors_of_an_older_one_below_a_prefix(trained: Run, spot: Spot, tmp_path: Path) -> None:
    out = tmp_path / "w.safetensors"
    done = spot("export", trained.uri, "1", "--format", "safetensors", "--prefix", "state_dict.", "-o", out)
    assert done.exit_code == 0, done.stderr
    loaded = load_file(out)
    assert list(loaded) == ["w"]
    assert torch.equal(loaded["w"], WEIGHT)


def test_dcp_folder_is_read_by_torch(trained: Run, spot: Spot, tmp_path: Path) -> None:
    assert spot("export", trained.uri, "--format", "dcp", "--out", tmp_path / "dcp").exit_code == 0
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "out.pt")
    loaded = torch.load(tmp_path / "out.pt", weights_only=False)  # written a line above, by torch itself
    assert torch.equal(loaded["state_dict"]["w"], WEIGHT * 2)


@pytest.mark.parametrize(
    ("args", "code"), [([], 2), (["--out", "{there}"], 2), (["9", "--out", "new"], 3), (["--format", "zip"], 2)]
)
def test_a_wrong_call_writes_nothing(trained: Run, spot: Spot, tmp_path: Path, args: list[str], code: int) -> None:
    there = tmp_path / "there"
    there.write_text("mine")
    assert spot("export", trained.uri, *(arg.format(there=there) for arg in args)).exit_code == code
    assert there.read_text() == "mine"


def test_damage_is_code_4_and_leaves_no_file(trained: Run, spot: Spot, tmp_path: Path) -> None:
    blob = next((Path(trained.uri) / "generations" / "000001-000000000002").glob("*.blob"))
    data = bytearray(blob.read_bytes())
    data[0] ^= 1
    blob.write_bytes(data)
    done = spot("export", trained.uri, "--out", tmp_path / "out.pt")
    assert done.exit_code == 4
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out.pt").exists()
