"""The layout of a rank's blob, and when a plan is the same object as before. Several ranks: test_ranks.py."""

from __future__ import annotations

import json
import weakref

import pytest
import torch

from spot_core.errors import FormatError
from spot_core.manifest import ObjectRef
from spot_core.pytorch.index import chunks_of
from spot_core.pytorch.plan import Planner, RankPlan


def document(plan: RankPlan) -> dict[str, object]:
    """The plan's index as a reader sees it."""
    index = plan.index({"s": 1}, {"l": 2})
    return {**index, "tensors": json.loads(index["tensors"].text)}


def test_items_are_aligned_apart_in_order_and_described() -> None:
    shared = {
        "b": torch.zeros(3),
        "a": torch.zeros(5, 7, dtype=torch.float16),
        "e": torch.zeros(0, 2),
        "s": torch.ones(()),
    }
    plan = Planner().plan(shared, {"x": torch.zeros(1)}, shared_objects={"o": b"123"}, local_objects={"p": b"4567"})
    assert [(item.fqn, item.offset, item.nbytes) for item in plan.items] == [
        ("b", 0, 12),
        ("a", 64, 70),
        ("e", 192, 0),
        ("s", 192, 4),
        ("rank00000.x", 256, 4),
        ("o", 320, 3),
        ("rank00000.p", 384, 4),
    ]
    assert plan.size == 448
    index = document(plan)
    assert index["objects"] == {"o": [320, 3], "rank00000.p": [384, 4]}
    assert index["tree"] == {"shared": {"s": 1}, "local": {"l": 2}}
    assert index["tensors"]["a"] == [
        {"offset": 64, "nbytes": 70, "dtype": "float16", "shape": [5, 7], "chunk": [[0, 0], [5, 7]]}
    ]
    assert {key: index[key] for key in ("format", "rank", "world_size")} == {"format": 1, "rank": 0, "world_size": 1}


def test_the_plan_is_the_same_object_while_the_tensors_are_the_same_memory() -> None:
    planner, weight = Planner(), torch.zeros(40_000)
    first = planner.plan({"w": weight.detach()}, {})
    assert planner.plan({"w": weight.detach()}, {}) is first
    moved = planner.plan({"w": weight.clone()}, {})
    assert moved is not first
    assert moved.items[0].tensor.data_ptr() != weight.data_ptr()
    assert planner.plan({"w": weight.detach()}, {}).items[0].tensor.data_ptr() == weight.data_ptr()


@pytest.mark.parametrize("shared", [False, True])
def test_small_tensors_made_anew_for_each_save_do_not_change_the_plan_but_do_change_their_values(shared: bool) -> None:
    planner, weight = Planner(), torch.zeros(40_000)
    kept = [torch.full((3,), -1.0)]  # holds on to memory, so that new tensors are elsewhere
    plans, seen = [], []
    for step in range(4):
        kept.append(torch.full((3,), float(step)))
        anew = {"rng": kept[-1]}
        plans.append(planner.plan({"w": weight, **anew}, {}) if shared else planner.plan({"w": weight}, anew))
        seen.append(plans[-1].items[1].tensor.tolist())
    assert seen == [[float(step)] * 3 for step in range(4)]
    # Of a rank's own tensors it is expected, of shared ones it is found out by the second save.
    assert (plans[1] is plans[0]) is not shared
    assert plans[3] is plans[2] is plans[1]


def test_objects_are_laid_out_for_each_save() -> None:
    planner, weight = Planner(), torch.zeros(40_000)
    plans = [planner.plan({"w": weight}, {}, local_objects={"o": bytes([65]) * size}) for size in (10, 200)]
    assert [plan.objects for plan in plans] == [{"rank00000.o": (160_000, 10)}, {"rank00000.o": (160_000, 200)}]
    assert bytes(plans[1].items[1].tensor.tolist()) == b"A" * 200
    assert planner.plan({"w": weight}, {}).size == 160_000


def test_the_planner_keeps_no_tensor_alive() -> None:
    planner, tensor = Planner(), torch.zeros(40_000)
    plan = planner.plan({"w": tensor}, {})
    held = weakref.ref(tensor)
    del tensor
    assert held() is plan.items[0].tensor
    del plan
    assert held() is None


@pytest.mark.parametrize(
    "entry",
    [
        {"offset": 0, "nbytes": 8, "dtype": "float32", "shape": [3], "chunk": [[0], [3]]},
        {"offset": 96, "nbytes": 12, "dtype": "float32", "shape": [3], "chunk": [[0], [3]]},
        {"offset": 0, "nbytes": 12, "dtype": "float32", "shape": [3], "chunk": [[1], [3]]},
        {"offset": 0, "nbytes": 12, "dtype": "float32", "shape": [3, 1], "chunk": [[0], [3]]},
        {"offset": -64, "nbytes": 12, "dtype": "float32", "shape": [3], "chunk": [[0], [3]]},
        {"offset": 0, "nbytes": 12, "dtype": "load", "shape": [3], "chunk": [[0], [3]]},
        {"offset": 0, "dtype": "float32", "shape": [3], "chunk": [[0], [3]]},
    ],
    ids=["size", "beyond the end", "box", "dimensions", "negative", "dtype", "field"],
)
def test_entries_that_do_not_add_up_are_refused(entry: dict[str, object]) -> None:
    class Index:
        raw = {"tensors": {"w": [entry]}}  # noqa: RUF012

    with pytest.raises(FormatError):
        chunks_of(Index(), ObjectRef("blob", 100, ""), "here")
