"""Whose random state a rank of a resumed fit goes on with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_spot.restore import Restored
from spot_core.pytorch import rng

Mesh = tuple[int, int]
"""(ranks that the data are shared out to, ranks of a tensor-parallel group)"""


def restored(saved: Mesh, present: Mesh, rank: int) -> Restored:
    """As rank `rank` of `present` sees what `saved` left."""
    (data, tensor), world = present, saved[0] * saved[1]
    kwargs = {"num_replicas": data, "rank": rank // tensor}
    trainer: Any = SimpleNamespace(
        strategy=SimpleNamespace(distributed_sampler_kwargs=kwargs), global_rank=rank, world_size=data * tensor
    )
    torch.manual_seed(1000 + rank)
    local = {
        "step": 7,
        "batches": {"ranks": saved[0]},
        "loaders": {"seed": 5},
        "rng": rng.capture(),
        "checkpoint": {"loops": {"fit_loop": {"state_dict": {}}}},
    }
    state = SimpleNamespace(
        world_size=world, nearest=local, local=local if rank < world else None, shared={}
    )
    resumed: Any = SimpleNamespace(state=state, generation="000001-000000000007", finished=False)
    return Restored(resumed, trainer)


def draws(saved: Mesh, present: Mesh) -> list[float]:
    found = []
    for rank in range(present[0] * present[1]):
        at = restored(saved, present, rank)
        torch.manual_seed(0)
        at.early_rng()
        found.append(float(torch.rand(())))
    return found


def own(rank: int) -> float:
    return float(torch.rand((), generator=torch.Generator().manual_seed(1000 + rank)))


def seeded(data_rank: int) -> float:
    rng.reseed(5, 7, data_rank)
    return float(torch.rand(()))


@pytest.mark.parametrize(("saved", "present"), [((2, 1), (2, 1)), ((4, 1), (2, 1)), ((2, 2), (2, 2)), ((2, 2), (1, 2))])
def test_a_rank_goes_on_with_its_own(saved: Mesh, present: Mesh) -> None:
    assert draws(saved, present) == [own(rank) for rank in range(present[0] * present[1])]


def test_ranks_without_one_are_seeded_by_their_data() -> None:
    assert draws((2, 1), (3, 1)) == [own(0), own(1), seeded(2)]
    assert draws((1, 2), (2, 2)) == [own(0), own(1), seeded(1), seeded(1)]


@pytest.mark.parametrize(("saved", "present"), [((2, 2), (1, 4)), ((4, 1), (2, 2)), ((1, 2), (1, 4)), ((1, 4), (2, 2))])
def test_ranks_that_share_batches_now_draw_alike(saved: Mesh, present: Mesh) -> None:
    """Even where each has a random state of its own: those were drawn from with other ranks."""
    data, tensor = present
    assert draws(saved, present) == [seeded(rank // tensor) for rank in range(data * tensor)]
