"""A small training whose every event is recorded, an interruption at a chosen step, comparison with the control."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

from accelerate_spot.trainer import SpotTrainerCallback
from spot_core.pytorch import fits

SAMPLES = 22
BATCH = 2  # 11 batches per epoch: with an accumulation of 4, the last update has 3
WORDS = 8
_TIMES = ("runtime", "per_second", "preparation_time")


def timeless(row: dict[str, Any]) -> dict[str, Any]:
    """A logged row without what depends on the time."""
    return {key: value for key, value in row.items() if not any(part in key for part in _TIMES)}


class Killed(BaseException):
    """Stands for SIGKILL: nothing of the script runs after it except what the Trainer itself does on the way out."""


class Samples(Dataset[Any]):
    """Item i holds its number. With `augment` the words depend on all three random generators."""

    def __init__(self, count: int = SAMPLES, *, augment: bool = False) -> None:
        self.count, self.augment = count, augment

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        if index >= self.count:
            raise IndexError(index)
        words = (torch.arange(WORDS) * 3 + index * 7) % 32
        if self.augment:
            words = words + random.randrange(8) + int(np.random.randint(8)) + int(torch.randint(8, ()))
        return {"input_ids": words, "labels": words, "index": torch.tensor(index)}


def model() -> GPT2LMHeadModel:
    """With GPT-2's own dropout of 0.1 and tied weights."""
    config = GPT2Config(
        vocab_size=64, n_positions=WORDS, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return GPT2LMHeadModel(config)


class Recorded(Trainer):
    """Notes which samples each batch held and its loss; inherits `train`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.ids: list[list[int]] = []
        self.losses: list[float] = []

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Tensor:
        self.ids.append(inputs.pop("index").tolist())
        loss = super().training_step(model, inputs, *args, **kwargs)
        self.losses.append(float(loss))
        return loss

    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs.pop("index")
        random.random(), np.random.rand(), torch.rand(3)  # an evaluation that draws
        return super().prediction_step(model, inputs, *args, **kwargs)


class Events(TrainerCallback):
    """What happened, without what depends on the time."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        # Drawn at every start, by user code: it must not move what the training draws.
        random.random(), np.random.rand(), torch.rand(3)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.seen.append(("log", state.global_step, timeless(logs)))

    def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("save", state.global_step))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("epoch end", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.seen.append(("end", state.global_step))


class KillAfterSave(TrainerCallback):
    """Raises `Killed` at the first event after the generation of `step` was committed."""

    def __init__(self, step: int, spot: SpotTrainerCallback) -> None:
        self.step, self.spot = step, spot

    def _check(self, *args: Any, **kwargs: Any) -> None:
        fit = self.spot._fit
        if fit is not None and fit._saved_step >= self.step:
            fit._open_session.drain()
            raise Killed

    on_step_begin = on_log = on_prediction_step = on_save = on_epoch_end = _check


@dataclass
class Outcome:
    trainer: Any
    events: list[Any]
    killed: bool
    result: Any = None

    @property
    def state(self) -> dict[str, Any]:
        trainer = self.trainer
        return {
            "model": {key: value.clone() for key, value in trainer.model.state_dict().items()},
            "optimizer": trainer.optimizer.state_dict(),
            "scheduler": trainer.lr_scheduler.state_dict(),
            "steps": (trainer.state.global_step, trainer.state.epoch, trainer.state.total_flos),
            "best": (trainer.state.best_metric, trainer.state.best_global_step),
            "history": [timeless(row) for row in trainer.state.log_history],
            "loss": self.result.training_loss,
        }


@dataclass
class Job:
    """A script: `start` is one start of it."""

    data: Callable[[], Any] = Samples
    model: Callable[[], Any] = model
    evaluate: str | None = None  # eval_strategy
    callbacks: Callable[[], list[Any]] = list
    arguments: dict[str, Any] = field(default_factory=dict)
    trainer: type[Recorded] = Recorded

    def start(
        self,
        at: Path,
        *,
        every: str = "1000 steps",
        seed: int = 7,
        kill: int | None = None,
        sources: str = "none",
        continued: dict[str, int] | None = None,
        made: list[Outcome] | None = None,
        **keyword: Any,
    ) -> Outcome:
        """`at`: folder of the job. `seed` differs between starts: nothing may depend on what the script draws.

        A start is a new process, unless the trainings that it made are `continued`. `made` gets the outcome of one
        that is left by an exception.
        """
        fits._returned.clear()
        fits._returned.update(continued or {})
        options = {
            "output_dir": str(at / "out"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": BATCH,
            "per_device_eval_batch_size": BATCH,
            "learning_rate": 0.01,
            "logging_steps": 2,
            "save_strategy": "no",
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "remove_unused_columns": False,
            "dataloader_pin_memory": False,
            "data_seed": 3,
            "seed": 5,
            **({"eval_strategy": self.evaluate} if self.evaluate else {}),
            **self.arguments,
        }
        args = TrainingArguments(**options)
        torch.manual_seed(1)
        module = self.model()
        spot = SpotTrainerCallback(at / "run", interval=every, sources=sources, writer="thread")
        events = Events()
        callbacks = [*self.callbacks(), events, spot]
        if kill is not None:
            callbacks.insert(0, KillAfterSave(kill, spot))  # before anybody notes the event
        trainer = self.trainer(
            module,
            args,
            train_dataset=self.data(),
            eval_dataset=Samples(6) if self.evaluate else None,
            callbacks=callbacks,
        )
        random.seed(seed), np.random.seed(seed), torch.manual_seed(seed)
        outcome = Outcome(trainer, events.seen, killed=False)
        if made is not None:
            made.append(outcome)
        try:
            outcome.result = trainer.train(**keyword)
        except Killed:
            outcome.killed = True
        return outcome


def assert_equal(got: Any, want: Any, where: str) -> None:
    """Bit for bit."""
    if isinstance(want, Tensor):
        assert isinstance(got, Tensor), where
        assert got.dtype == want.dtype, where
        assert torch.equal(got, want), f"{where}: {got} is not {want}"
    elif isinstance(want, dict):
        assert got.keys() == want.keys(), where
        for key in want:
            assert_equal(got[key], want[key], f"{where}.{key}")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), f"{where}: {got} is not {want}"
        for number, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_equal(a, b, f"{where}[{number}]")
    else:
        assert got == want, f"{where}: {got!r} is not {want!r}"


def assert_continues(job: Job, at: Path, kills: list[int]) -> tuple[Outcome, list[Outcome]]:
    """Kill after the generation of each step in `kills`, restart, and compare the whole with the control."""
    control = job.start(at / "control")
    lives = [
        job.start(at / "job", every=f"{step} steps", seed=100 + number if number else 7, kill=step)
        for number, step in enumerate(kills)
    ]
    assert [life.killed for life in lives] == [True] * len(lives)
    lives.append(job.start(at / "job", seed=99))
    assert not lives[-1].killed
    for name in ("ids", "losses"):
        got = [item for life in lives for item in getattr(life.trainer, name)]
        assert_equal(got, getattr(control.trainer, name), name)
    assert_equal([event for life in lives for event in life.events], control.events, "events")
    assert_equal(lives[-1].state, control.state, "state")
    return control, lives
