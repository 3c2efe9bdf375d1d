"""What can only be seen from inside: when staging is waited for, exchanged weights, loops that are not known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_spot import attach, attaching
from accelerate_spot import job as job_module
from spot_core.errors import ResumeMismatchError
from spot_core.policy import Decision, Kind

from ._fresh import fresh  # noqa: F401 - of every test here


def training(run: Path, *, interval: str = "1000 steps") -> tuple[Any, Any, Any, Any]:
    accelerator = attach(Accelerator(cpu=True), run, interval=interval, sources="none", writer="thread")
    model = torch.nn.Linear(1, 1)
    return accelerator, *accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
    )


def step(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> None:
    accelerator.backward(model(batch).square().mean())
    optimizer.step()
    optimizer.zero_grad()


def test_staging_is_over_before_an_optimizer_changes_a_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    accelerator, model, optimizer, loader = training(tmp_path, interval="1 steps")
    seen: list[float] = []
    original = job_module.Session.wait_staged
    monkeypatch.setattr(
        job_module.Session, "wait_staged", lambda self: (seen.append(model.weight.item()), original(self))[1]
    )
    for batch in loader:
        before = model.weight.item()
        step(accelerator, model, optimizer, batch)
        assert seen[-1] == before != model.weight.item()


def test_weights_that_were_exchanged_for_an_evaluation_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accelerator, model, optimizer, loader = training(tmp_path)
    evaluation = accelerator.prepare(DataLoader(torch.zeros(3, 1)))
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    job = attaching.current()
    acted: list[str] = []
    monkeypatch.setattr(job, "_act", lambda decision, shared, local: acted.append(decision.reason))
    stop = Decision(Kind.STOP_SAVE, "told", None)
    monkeypatch.setattr(job_module.Session, "boundary", lambda self, step: stop)
    kept = model.weight.detach().clone()
    for number, _ in enumerate(evaluation):
        if number == 0:
            model.weight.data.fill_(7)  # averaged weights come in
        elif number == 1:
            assert acted == []
            model.weight.data.copy_(kept)
    assert acted == ["told"] * len(acted) != []


def test_a_loop_that_is_not_known_is_not_resumed_in_a_later_epoch(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = training(tmp_path, interval="1 steps")
    for epoch in range(2):
        for number, batch in enumerate(loader):
            if epoch == 1 and number == 3:
                break
            step(accelerator, model, optimizer, batch)
    attaching.current()._session.drain()
    attaching.current().close()
    attaching._job = None
    accelerator, model, optimizer, loader = training(tmp_path)
    with pytest.raises(ResumeMismatchError, match="later pass"):
        next(iter(loader))
