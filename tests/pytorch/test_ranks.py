"""Two real gloo ranks: who writes what, sharded states, resharding, kept plans, errors on every rank."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from spot_core.pytorch.loader import LoadedState, load
from spot_core.run import Run
from spot_core.verify import Depth

from .rank_jobs import LARGE
from .same import same

pytestmark = pytest.mark.dist

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    """The folder of the jobs' runs, and what each rank said of each job."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, "-m", "tests.pytorch.rank_jobs"]
    workers = [
        subprocess.Popen(
            [*command, str(rank), "2", str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [worker.communicate(timeout=200)[0] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(outputs)
    return folder, [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def loaded(folder: Path, rank: int = 0, world: int = 2) -> LoadedState:
    run = Run.open(folder)
    return load(run.store, run.verify(run.discover().generations[0], Depth.DIGESTS), rank=rank, world=world)


def test_replicated_tensors_are_written_once_and_large_ones_by_turns(ranks: Any) -> None:
    _, (zero, one) = ranks
    items = [set(said["replicated"]["items"]) for said in (zero, one)]
    weights = [{name for name in mine if name.startswith("w")} for mine in items]
    assert weights[0] | weights[1] == {f"w{i}" for i in range(6)}
    assert not weights[0] & weights[1]
    assert [len(mine) for mine in weights] == [2, 4]  # rank 0 has the pinned mask as well
    assert items[0] >= {"buffer", "mask", "rank00000.rng", "rank00000.large"}
    assert items[1] >= {"rank00001.rng", "rank00001.large"}
    assert not items[1] & {"buffer", "mask"}


def test_rank_0s_buffers_are_the_ones_saved_and_every_rank_has_its_own_state(ranks: Any) -> None:
    for rank in (0, 1):
        state = loaded(ranks[0] / "replicated", rank)
        assert state.shared["buffer"].tolist() == [0, 0, 0, 0]
        assert same(state.shared["mask"], torch.zeros(LARGE))
        torch.manual_seed(0)
        assert all(torch.equal(state.shared[f"w{i}"], torch.randn(LARGE + i)) for i in range(6))
        assert state.local["name"] == f"I am {rank}"
        assert same(state.local["rng"], torch.full((3,), float(rank)))
        assert state.local["large"] == bytes([rank]) * 9000
        assert state.same_world


def test_a_sharded_state_is_whole_again_on_one_rank(ranks: Any) -> None:
    state = loaded(ranks[0] / "sharded", 0, world=1)
    torch.manual_seed(1)
    expected = {
        "rows": torch.randn(6, 4),
        "uneven": torch.randn(5, 3),
        "columns": torch.randn(4, 7),
        "one_row": torch.randn(1, 3),
        "alike": torch.randn(LARGE),
        "scalar": torch.randn(()),
    }
    assert same(state.shared["model"], expected)
    assert state.shared["tied"]["a"] is state.shared["tied"]["b"]
    assert torch.equal(state.shared["tied"]["a"], expected["one_row"])
    assert not state.same_world


def test_shards_are_written_by_their_owners(ranks: Any) -> None:
    _, (zero, one) = ranks
    both = {"model.rows", "model.uneven", "model.columns"}
    assert both <= set(zero["sharded"]["items"])
    assert both <= set(one["sharded"]["items"])
    for name in ("model.alike", "model.scalar", "model.one_row"):
        assert (name in zero["sharded"]["items"]) != (name in one["sharded"]["items"])


def test_other_shardings_read_it_with_our_loader_and_with_stock_dcp(ranks: Any) -> None:
    for said in ranks[1]:
        assert said["read_back"] == {"ours": True, "in_place": True, "stock": True, "same_world": True}


def test_the_plan_is_kept_until_any_ranks_state_changes_form(ranks: Any) -> None:
    zero, one = (said["cached"] for said in ranks[1])
    # First save; kept; optimizer state appears; kept; a tensor on rank 1 alone; its dtype.
    assert zero["counts"] == one["counts"] == [1, 1, 2, 2, 3, 4]
    assert zero["same_object"]
    assert one["same_object"]
    assert zero["optimizer_items"] + one["optimizer_items"] == 4  # two parameters, two moments


def test_what_cannot_be_planned_is_refused_on_every_rank(ranks: Any) -> None:
    folder, (zero, one) = ranks
    assert len(zero["refused"]) == 4
    assert len(one["refused"]) == 3  # the one that called `fail` knows already
    for said in (zero["refused"], one["refused"]):
        assert "'x' has shape (4,)" in said[0]
        assert "int32" in said[1]
        assert "Partial" in said[2]
    assert "Another rank" in zero["refused"][3]
    assert same(loaded(folder / "refused").shared, {"x": torch.ones(2)})


def test_fsdp1s_sharded_tensors_are_saved_by_their_owners_and_filled_in_place(ranks: Any) -> None:
    folder, said = ranks
    assert loaded(folder / "old_shards").shared["w"].tolist() == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    assert [mine["old_shards"] for mine in said] == [[[1.0] * 3] * 2, [[2.0] * 3] * 2]
