"""Told to stop: saved at a step boundary, out of `train` with the exit code, continued exactly (N2, N3, N5)."""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from transformers import TrainerCallback

from spot_core.errors import DeadlineError
from spot_core.launch.stoprecord import read_stop
from spot_core.pytorch.session import Session
from spot_core.run import Run

from ._harness import Job, Outcome, Samples, assert_equal

noisy = partial(Samples, augment=True)


class Signal(TrainerCallback):
    """Sends the signal to this process at one event of one step, and lets the notice arrive."""

    def __init__(self, event: str, step: int, number: int = signal.SIGTERM) -> None:
        self.step, self.number = step, number
        setattr(self, event, self._send)

    def _send(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            self.step = -1
            os.kill(os.getpid(), self.number)


class Pause(TrainerCallback):
    """Gives the watcher's thread the time of a real step."""

    def _wait(self, *args: Any, **kwargs: Any) -> None:
        import threading

        threading.Event().wait(0.03)

    on_step_begin = on_prediction_step = _wait


def told(job: Job, at: Path, event: str, step: int, number: int = signal.SIGTERM, **keyword: Any) -> Outcome:
    made: list[Outcome] = []
    stopping = Job(
        job.data,
        evaluate=job.evaluate,
        arguments=job.arguments,
        callbacks=lambda: [Signal(event, step, number), Pause()],
    )
    with pytest.raises(SystemExit) as left:
        stopping.start(at, sources="signals:sigterm+sigusr1", made=made, **keyword)
    assert left.value.code == 143
    return made[0]


@pytest.mark.parametrize(
    ("event", "step", "saved", "arguments", "number"),
    [
        ("on_step_begin", 4, range(5, 12), {}, signal.SIGUSR1),
        # In the middle of an accumulation.
        ("on_substep_end", 1, range(2, 5), {"gradient_accumulation_steps": 4}, signal.SIGTERM),
        # At the end of an epoch, or soon after it.
        ("on_step_begin", 10, range(11, 18), {}, signal.SIGTERM),
    ],
)
def test_a_signal_in_training(
    tmp_path: Path, event: str, step: int, saved: range, arguments: dict[str, Any], number: int
) -> None:
    job = Job(noisy, arguments=arguments)
    control = job.start(tmp_path / "control")
    first = told(job, tmp_path / "job", event, step, number)
    newest = Run.open(tmp_path / "job" / "run").discover().generations[0].id.step
    assert newest in saved
    assert newest == first.trainer.state.global_step
    assert ("end", newest) not in first.events, "the training was finished instead of left"
    done = job.start(tmp_path / "job", seed=99)
    assert_equal(first.trainer.ids + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(first.trainer.losses + done.trainer.losses, control.trainer.losses, "losses")
    assert_equal(done.state, control.state, "state")


@pytest.mark.parametrize(("strategy", "step"), [("steps", 4), ("epoch", 11), ("epoch", 22)])
def test_a_signal_in_an_evaluation(tmp_path: Path, strategy: str, step: int) -> None:
    """The generation is of the step before it, and the evaluation is done again in full."""
    job = Job(noisy, evaluate=strategy, arguments={"eval_steps": 4, "per_device_eval_batch_size": 1})
    control = job.start(tmp_path / "control")
    first = told(job, tmp_path / "job", "on_prediction_step", step)
    assert Run.open(tmp_path / "job" / "run").discover().generations[0].id.step == step
    assert ("evaluate", step) not in first.events
    done = job.start(tmp_path / "job", seed=99)
    assert done.events[:2] == control.events[control.events.index(done.events[0]) :][:2]
    assert ("evaluate", step) in done.events
    assert_equal(first.trainer.ids + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(done.state, control.state, "state")


def test_a_signal_in_an_evaluation_that_is_done_again(tmp_path: Path) -> None:
    """The step is saved already: nothing is saved twice, and the second stop loses nothing."""
    job = Job(noisy, evaluate="epoch", arguments={"per_device_eval_batch_size": 1})
    control = job.start(tmp_path / "control")
    first = told(job, tmp_path / "job", "on_prediction_step", 11)
    second = told(job, tmp_path / "job", "on_prediction_step", 11, seed=98)
    assert second.trainer.ids == []
    assert [each.id.step for each in Run.open(tmp_path / "job" / "run").discover().generations] == [11]
    done = job.start(tmp_path / "job", seed=99)
    assert_equal(first.trainer.ids + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(done.state, control.state, "state")


def test_no_time_for_the_last_generation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The notice comes while the finished training is saved: the job leaves as one that was stopped, and ends later."""
    job = Job(noisy)
    control = job.start(tmp_path / "control")
    save = Session.save

    def late(self: Session, step: int, *, finished: bool = False, **given: Any) -> None:
        if finished:
            raise DeadlineError("step 22 is not saved: no time is left")
        save(self, step, finished=finished, **given)

    monkeypatch.setattr(Session, "save", late)
    made: list[Outcome] = []
    with pytest.raises(SystemExit) as left:
        job.start(tmp_path / "job", every="15 steps", made=made)
    assert left.value.code == 143
    monkeypatch.undo()
    record = read_stop(Run.open(tmp_path / "job" / "run").store, 1)
    assert record is not None
    assert "no time is left" in record.reason
    done = job.start(tmp_path / "job", seed=99)
    assert_equal(made[0].trainer.ids[:15] + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(done.state, control.state, "state")
