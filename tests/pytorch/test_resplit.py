"""A state taken apart again gives what `split` gives, and the very same tensors when only values changed (W2)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from spot_core.pytorch.plan import Planner
from spot_core.pytorch.resplit import Resplitter
from spot_core.pytorch.state import Split, split

State = dict[str, Any]


def state() -> State:
    weight = torch.arange(12.0).reshape(3, 4)
    return {
        "w": weight,
        "tied": weight,
        "b": nn.Parameter(torch.ones(5)),
        "n": 1,
        "lr": 0.5,
        "list": [torch.zeros(2)],
        "fixed": nn.Parameter(torch.ones(2), requires_grad=False),
    }


def views(parts: Split) -> dict[str, tuple[Any, ...]]:
    return {
        name: (t.data_ptr(), t.shape, t.stride(), t.dtype, t.flatten().tolist()) for name, t in parts.tensors.items()
    }


def test_a_training_is_recognised() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    splitter, seen, trees = Resplitter(), [], []
    for step in range(3):
        model(torch.randn(6, 4)).sum().backward()
        optimizer.step()
        now = {"step": step, "model": model.state_dict(), "optimizer": optimizer.state_dict()}
        parts, fresh = splitter.split(now), split(now)
        assert parts.tree == fresh.tree
        assert views(parts) == views(fresh)
        seen.append(parts.tensors)
        trees.append(parts.tree["$"] == "dict" and dict(parts.tree["items"])["step"])
    assert seen[0] is seen[1] is seen[2]
    assert trees == [0, 1, 2]
    assert seen[0]["model.1.num_batches_tracked"].item() == 3


CHANGES: dict[str, Callable[[State], Any]] = {
    "moved": lambda s: s.update(b=nn.Parameter(torch.ones(5))),
    "moved behind the same object": lambda s: setattr(s["b"], "data", torch.ones(5)),
    "another shape": lambda s: s.update(list=[s["list"][0].view(1, 2)]),
    "other strides": lambda s: s.update(dict.fromkeys(("w", "tied"), s["w"].view(4, 3).t())),
    "fewer rows": lambda s: s.update(dict.fromkeys(("w", "tied"), s["w"][:2])),
    "another type": lambda s: s.update(list=[s["list"][0].view(torch.int32)]),
    "a gradient": lambda s: s["list"][0].requires_grad_(),
    "no parameter": lambda s: s.update(fixed=s["fixed"].detach()),
    "one more": lambda s: s.update(x=torch.ones(1)),
    "one less": lambda s: s.pop("b"),
    "the owner of a tie less": lambda s: s.pop("w"),
    "a tie cut": lambda s: s.update(tied=s["w"].clone()),
    "a tie made": lambda s: s.update(tied=s["b"].detach()),
    "a part of it": lambda s: s.update(w=s["w"][1:]),
    "no memory": lambda s: s.update(list=[torch.zeros(0)]),
    "an array": lambda s: s.update(list=[np.arange(3)]),
    "sparse": lambda s: s.update(list=[torch.eye(2).to_sparse()]),
    "bytes": lambda s: s.update(n=bytes(5000)),
    "under another name": lambda s: s.update(c=s.pop("b")),
    "no tensor": lambda s: s.update(list=[]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_is_seen(change: str) -> None:
    splitter, now = Resplitter(), state()
    before = splitter.split(now)
    assert splitter.split(now).tensors is before.tensors
    CHANGES[change](now)
    for _ in range(2):
        parts, fresh = splitter.split(now), split(now)
        assert parts.tree == fresh.tree
        assert parts.objects == fresh.objects
        assert parts.tensors is not before.tensors
        if change != "sparse":
            assert {**views(parts)}.keys() == views(fresh).keys()
        if change not in ("sparse", "an array"):  # which are made anew by each split
            assert views(parts) == views(fresh)


def test_conjugates_are_resolved_at_every_save() -> None:
    splitter, value = Resplitter(), torch.tensor([1 + 2j])
    splitter.split({"z": value})
    assert splitter.split({"z": value.conj()}).tensors["z"].tolist() == [1 - 2j]
    value.fill_(3 + 1j)
    assert splitter.split({"z": value.conj()}).tensors["z"].tolist() == [3 - 1j]
    assert splitter.split({"z": value}).tensors["z"].tolist() == [3 + 1j]


def test_paths_that_spell_alike_are_not_mistaken() -> None:
    splitter = Resplitter()
    one, two = torch.ones(2), torch.zeros(2)
    splitter.split({"a.b": one, "a": {"b": two}})
    parts = splitter.split({"a.b": two, "a": {"b": one}})
    assert [tensor.data_ptr() for tensor in parts.tensors.values()] == [two.data_ptr(), one.data_ptr()]


def test_the_planner_takes_the_same_tensors_as_they_were() -> None:
    """Also where small ones are made anew for each save, which go through buffers of the planner."""
    splitter, planner = Resplitter(), Planner()
    weight, small, kept = torch.zeros(40_000), torch.zeros(3), []
    plans, seen = [], []
    for step in range(5):
        weight.fill_(step)
        small.fill_(10 + step)
        if step == 1:
            small = small.clone()  # from here on the planner has a buffer for it
        kept.append(torch.full((3,), float(step)))
        plans.append(planner.plan(splitter.split({"s": small, "w": weight}).tensors, {"rng": kept[-1]}))
        seen.append([item.tensor[0].item() for item in plans[-1].items])
    assert seen == [[10.0 + step, float(step), float(step)] for step in range(5)]
    assert plans[4] is plans[3] is plans[2]
