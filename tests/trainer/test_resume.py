"""A training that was killed and started again is the training that was not: ids, losses, rows, weights (S1-S3, R1)."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback

from ._harness import SAMPLES, Job, Samples, assert_continues

noisy = partial(Samples, augment=True)


@pytest.mark.parametrize(
    ("arguments", "kills"),
    [
        ({}, [3]),
        ({}, [11]),  # the last step of the first epoch
        ({}, [4, 15]),
        ({"gradient_accumulation_steps": 4}, [2]),
        ({"gradient_accumulation_steps": 4}, [3]),  # an epoch's last update, of 3 batches
        ({"gradient_accumulation_steps": 4, "logging_steps": 1}, [4]),
        ({"max_steps": 17, "logging_strategy": "epoch"}, [11]),
        ({"max_steps": 17, "dataloader_drop_last": True, "max_grad_norm": 0.0}, [17]),  # the very last step
        ({"train_sampling_strategy": "group_by_length", "length_column_name": "length"}, [5, 13]),
        ({"accelerator_config": {"use_seedable_sampler": False}, "data_seed": None}, [5, 13]),
    ],
    ids=lambda value: "-".join(map(str, value if isinstance(value, list) else value.values())) or "plain",
)
def test_continues(tmp_path: Path, arguments: dict[str, Any], kills: list[int]) -> None:
    assert_continues(Job(noisy, arguments=arguments), tmp_path, kills)


def test_continues_with_workers(tmp_path: Path) -> None:
    arguments = {"dataloader_num_workers": 2, "dataloader_persistent_workers": True, "gradient_accumulation_steps": 2}
    assert_continues(Job(noisy, arguments=arguments), tmp_path, [4, 6])


@pytest.mark.parametrize(
    ("strategy", "arguments", "kills"),
    [
        ("steps", {"eval_steps": 3}, [3]),  # the evaluation was due, and is done after the resume
        ("epoch", {}, [11]),
        ("epoch", {"logging_strategy": "epoch", "eval_on_start": True}, [11, 22]),
        ("steps", {"eval_steps": 4, "lr_scheduler_type": "reduce_lr_on_plateau", "metric_for_best_model": "loss"}, [8]),
    ],
)
def test_continues_with_evaluations(tmp_path: Path, strategy: str, arguments: dict[str, Any], kills: list[int]) -> None:
    assert_continues(Job(noisy, evaluate=strategy, arguments=arguments), tmp_path, kills)


def test_the_order_is_the_one_that_was_begun(tmp_path: Path) -> None:
    """Without a seed of its own accelerate's sampler takes the process's, which differs between these starts."""
    assert_continues(Job(noisy, arguments={"data_seed": None}), tmp_path, [4, 13])


class Stream(IterableDataset[Any]):
    """Without length or index."""

    def __iter__(self) -> Iterator[Any]:
        return (Samples()[index] for index in range(SAMPLES))


def test_a_stream_is_read_again_up_to_the_place(tmp_path: Path) -> None:
    assert_continues(Job(Stream, arguments={"max_steps": 18}), tmp_path, [4, 13])


class Counting(TrainerCallback):
    """Has a memory that decides about the training."""

    def __init__(self) -> None:
        self.steps = 0

    def state_dict(self) -> dict[str, int]:
        return {"steps": self.steps}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.steps = state["steps"]

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.steps += 1
        control.should_epoch_stop = self.steps in (5, 9)
        if self.steps == 7:
            model.lm_head.weight.requires_grad_(False)


def test_callbacks_and_what_they_did_are_as_before(tmp_path: Path) -> None:
    """An epoch that was ended early, a frozen weight, the patience of early stopping."""
    early = {"metric_for_best_model": "loss", "eval_steps": 2, "num_train_epochs": 6, "learning_rate": 1.0}
    job = Job(
        noisy, evaluate="steps", arguments=early, callbacks=lambda: [Counting(), EarlyStoppingCallback(3)]
    )
    control, lives = assert_continues(job, tmp_path, [5, 8])
    assert control.trainer.state.global_step < 66, "it was not stopped early"
    assert not control.trainer.model.lm_head.weight.requires_grad
    assert not lives[-1].trainer.model.lm_head.weight.requires_grad


def test_the_device_generators_and_threads_are_left_as_they_were(tmp_path: Path) -> None:
    """`args` and the trainer are the user's: nothing of the fit is left on them."""
    job = Job(noisy, arguments={"eval_on_start": True}, evaluate="epoch")
    job.start(tmp_path, every="3 steps", kill=3)
    done = job.start(tmp_path)
    trainer = done.trainer
    assert trainer.args.eval_on_start is True
    assert trainer.args.ignore_data_skip is False
    assert not [name for name in vars(trainer) if name.startswith(("_around", "get_", "_maybe", "_run", "_load"))]
    assert torch.get_num_threads() == 1
