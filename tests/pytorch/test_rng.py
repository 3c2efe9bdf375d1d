"""Random state: captured, stored as plain data, restored to the same draws; reseeding by rank and step."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from spot_core.pytorch import rng
from spot_core.pytorch.state import join, split


@pytest.fixture(autouse=True)
def _leave_no_trace() -> Iterator[None]:
    state = rng.capture()
    yield
    rng.restore(state)


def draws() -> list[Any]:
    return [
        random.random(),
        random.gauss(0, 1),
        float(np.random.rand()),
        float(np.random.standard_normal()),
        torch.rand(3).tolist(),
        torch.nn.functional.dropout(torch.ones(50)).tolist(),
    ]


def test_the_same_draws_follow_after_a_trip_through_the_tree() -> None:
    draws()  # both gauss caches hold a value
    parts = split(rng.capture())
    assert not parts.objects
    expected = draws()
    copies = {name: tensor.clone() for name, tensor in parts.tensors.items()}
    draws()
    rng.restore(join(json.loads(json.dumps(parts.tree, sort_keys=True)), copies, {}))
    assert draws() == expected


def test_a_captured_state_does_not_move_with_the_generators() -> None:
    state = rng.capture()
    first = draws()
    rng.restore(state)
    assert draws() == first
    rng.restore(state)
    assert draws() == first


def test_reseeding_depends_on_seed_step_and_rank_and_on_nothing_else() -> None:
    seen = {}
    for key in [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1), (0, 10, 1), (0, 1, 101), (2**70, 5, 3)]:
        rng.reseed(*key)
        seen[key] = draws()
        rng.reseed(*key)
        assert draws() == seen[key]
    for generator in zip(*seen.values(), strict=True):
        assert len({json.dumps(value) for value in generator}) == len(seen)


def test_another_kind_of_device_is_reported_not_guessed(caplog: pytest.LogCaptureFixture) -> None:
    state = {**rng.capture(), "devices": {"type": "abacus", "current": 0, "states": [torch.zeros(16)]}}
    with caplog.at_level(logging.WARNING):
        rng.restore(state)
    assert "abacus" in caplog.text


class FakeDevices:
    """A device module with three generators whose state is a number."""

    def __init__(self, count: int, current: int) -> None:
        self.states = [torch.tensor([index]) for index in range(count)]
        self.current = current

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.states)

    def current_device(self) -> int:
        return self.current

    def get_rng_state_all(self) -> list[torch.Tensor]:
        return list(self.states)

    def set_rng_state_all(self, states: list[torch.Tensor]) -> None:
        raise AssertionError("it would fail where there are fewer devices")

    def set_rng_state(self, state: torch.Tensor, index: int) -> None:
        self.states[index] = state


def test_the_current_device_gets_the_state_of_the_one_that_was_current(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = FakeDevices(3, current=2), FakeDevices(2, current=0)
    monkeypatch.setattr(rng, "_device_module", lambda: ("fake", before))
    state = rng.capture()
    after.states = [torch.tensor([-1]), torch.tensor([-1])]
    monkeypatch.setattr(rng, "_device_module", lambda: ("fake", after))
    rng.restore(state)
    assert [int(value) for value in after.states] == [2, 1]


@pytest.mark.gpu
def test_device_generators_continue() -> None:
    torch.cuda.init()
    state = rng.capture()
    first = torch.rand(4, device="cuda").tolist()
    rng.restore(state)
    assert torch.rand(4, device="cuda").tolist() == first
    rng.reseed(1, 2, 3)
    one = torch.rand(4, device="cuda").tolist()
    rng.reseed(1, 2, 3)
    assert torch.rand(4, device="cuda").tolist() == one


def test_a_rank_without_a_state_is_seeded_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    saved = rng.capture()
    expected = torch.rand(3)
    rng.resume(saved, seed=1, step=2, rank=3)
    assert torch.equal(torch.rand(3), expected)
    assert caplog.text == ""
    rng.resume(None, seed=1, step=2, rank=3)
    drawn = torch.rand(3)
    rng.reseed(1, 2, 3)
    assert torch.equal(torch.rand(3), drawn)
    assert "rank 3 has no random state" in caplog.text
