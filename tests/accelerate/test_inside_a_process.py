"""What can only be seen from inside: when staging is waited for, exchanged weights, loops that are not known."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from accelerate_spot import attach, attaching, epochs
from accelerate_spot import job as job_module
from spot_core.errors import DeadlineError, ResumeMismatchError
from spot_core.launch.stoprecord import read_stop
from spot_core.policy import Decision, Kind
from spot_core.pytorch.loader import load
from spot_core.run import Run
from spot_core.signals.notice import Notice, NoticeKind
from spot_core.verify import Depth

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
    monkeypatch.setattr(job_module.Session, "boundary", lambda self, step, again=False: stop)
    kept = model.weight.detach().clone()
    for number, _ in enumerate(evaluation):
        if number == 0:
            model.weight.data.fill_(7)  # averaged weights come in
        elif number == 1:
            assert acted == []
            model.weight.data.copy_(kept)
    assert acted == ["told"] * len(acted) != []


def notified() -> None:
    """The job's session is told to stop, as by a signal, and its next boundary knows it."""
    session = attaching.current()._session
    session.notify(Notice("signals", NoticeKind.PREEMPTION, "sigterm"))
    pause = threading.Event()
    while session._live.agreement._quiet:
        pause.wait(0.002)


def test_a_stop_that_waited_saves_the_update_it_came_to(tmp_path: Path) -> None:
    """Told in an evaluation with exchanged weights: there, no state could be saved."""
    accelerator, model, optimizer, loader = training(tmp_path)
    evaluation = accelerator.prepare(DataLoader(torch.zeros(2, 1)))

    def train() -> None:
        for _ in range(2):
            for batch in loader:
                step(accelerator, model, optimizer, batch)
            notified()
            model.weight.data.fill_(7)
            assert len(list(evaluation)) == 2

    with pytest.raises(SystemExit):
        train()
    found = Run.open(tmp_path).discover().generations
    assert [each.id.step for each in found] == [5]  # of 4 in a pass


def test_a_stop_whose_step_is_saved_already_waits_for_nothing(tmp_path: Path) -> None:
    accelerator, model, optimizer, loader = training(tmp_path, interval="4 steps")
    evaluation = accelerator.prepare(DataLoader(torch.zeros(2, 1)))
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    notified()
    model.weight.data.fill_(7)
    with pytest.raises(SystemExit):
        list(evaluation)
    assert [each.id.step for each in Run.open(tmp_path).discover().generations] == [4]


def test_buffers_that_an_evaluation_changes_do_not_hold_up_a_stop(tmp_path: Path) -> None:
    """DDP gives a rank the first one's buffers before every forward pass; those at the update are what is saved."""
    accelerator = attach(Accelerator(cpu=True), tmp_path, interval="1000 steps", sources="none", writer="thread")
    model = torch.nn.BatchNorm1d(1)
    optimizer, data = torch.optim.SGD(model.parameters(), 0.5), torch.arange(8.0).reshape(8, 1)
    model, optimizer, loader, evaluation = accelerator.prepare(
        model, optimizer, DataLoader(data, batch_size=4), DataLoader(data)
    )
    for batch in loader:
        step(accelerator, model, optimizer, batch)
    kept = model.running_mean.clone()
    notified()
    model.running_mean.fill_(7)
    with pytest.raises(SystemExit):
        list(evaluation)
    run = Run.open(tmp_path)
    (committed,) = run.discover().generations
    state = load(run.store, run.verify(committed, Depth.DIGESTS), rank=0, world=1)
    assert torch.equal(state.shared["models"][0]["running_mean"], kept)


def test_no_stop_inside_an_accumulation(tmp_path: Path) -> None:
    """Also not in the first one of a pass, with the state of the pass before at hand."""
    accelerator = attach(
        Accelerator(cpu=True, gradient_accumulation_steps=2), tmp_path, interval="1000 steps", sources="none",
        writer="thread",
    )
    model = torch.nn.Linear(1, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), 0.5), DataLoader(torch.arange(8.0).reshape(8, 1), batch_size=2)
    )
    batches = 0

    def train() -> None:
        nonlocal batches
        for _ in range(2):
            for batch in loader:
                with accelerator.accumulate(model):
                    step(accelerator, model, optimizer, batch)
                batches += 1
                if batches == 5:
                    notified()

    with pytest.raises(SystemExit):
        train()
    assert batches == 6
    assert [each.id.step for each in Run.open(tmp_path).discover().generations] == [3]


def test_no_time_for_the_last_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes while the finished training is saved: the job leaves as one that was stopped."""
    accelerator, model, optimizer, loader = training(tmp_path, interval="3 steps")
    save = job_module.Session.save

    def late(self: Any, number: int, *, finished: bool = False, **given: Any) -> None:
        if finished:
            raise DeadlineError("step 4 is not saved: no time is left")
        save(self, number, finished=finished, **given)

    monkeypatch.setattr(job_module.Session, "save", late)

    def train() -> None:
        for _ in epochs(1):
            for batch in loader:
                step(accelerator, model, optimizer, batch)

    with pytest.raises(SystemExit) as left:
        train()
    assert left.value.code == 143
    run = Run.open(tmp_path)
    record = read_stop(run.store, 1)
    assert record is not None
    assert "no time is left" in record.reason
    assert [each.id.step for each in run.discover().generations] == [3]


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
