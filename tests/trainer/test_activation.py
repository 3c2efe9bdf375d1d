"""The variable SPOT_RUN alone, in a script without a changed line; and Trainers that have no run (L3)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from transformers import Trainer, TrainingArguments

from accelerate_spot.trainer import SpotTrainerCallback, _compat, patch
from spot_core.errors import ConfigError
from spot_core.run import Run

from ._harness import Samples, model


class Plain(Trainer):
    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        inputs.pop("index")
        return super().training_step(model, inputs, *args, **kwargs)


def script(out: Path, kind: type[Trainer] = Plain, **more: Any) -> Trainer:
    args = TrainingArguments(
        str(out), max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, remove_unused_columns=False,
        save_strategy="no", **more,
    )  # fmt: skip
    return kind(model(), args, train_dataset=Samples())


def spots(trainer: Trainer) -> int:
    return sum(isinstance(each, SpotTrainerCallback) for each in trainer.callback_handler.callbacks)


def test_the_variable_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    patch(_compat.module)
    patch(_compat.module)  # once is enough
    monkeypatch.setenv("SPOT_RUN", str(tmp_path / "run"))
    monkeypatch.setenv("SPOT_INTERVAL", "2 steps")
    monkeypatch.setenv("SPOT_WRITER", "thread")
    monkeypatch.setenv("SPOT_SOURCES", "none")
    trainer = script(tmp_path / "out")
    assert spots(trainer) == 1
    trainer.train()
    steps = [each.id.step for each in Run.open(tmp_path / "run").discover().generations]
    assert steps == [3, 2]
    with pytest.raises(ConfigError, match="enable_jit_checkpoint"):
        script(tmp_path / "out", enable_jit_checkpoint=True)


def test_without_it_nothing_happens(tmp_path: Path) -> None:
    patch(_compat.module)
    trainer = script(tmp_path / "out")
    assert spots(trainer) == 0
    assert trainer.train().global_step == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]


def test_a_trainer_with_a_loop_of_its_own_is_refused(tmp_path: Path) -> None:
    class Own(Plain):
        def train(self, *args: Any, **kwargs: Any) -> Any:  # as some of TRL's do
            self.callback_handler.on_train_begin(self.args, self.state, self.control)

    trainer = script(tmp_path / "out", Own)
    trainer.add_callback(SpotTrainerCallback(tmp_path / "run", sources="none"))
    with pytest.raises(ConfigError, match="a loop of its own"):
        trainer.train()
    assert not (tmp_path / "run").exists()


def test_no_run_at_all_is_refused(tmp_path: Path) -> None:
    trainer = script(tmp_path / "out")
    trainer.add_callback(SpotTrainerCallback)
    with pytest.raises(ConfigError, match="SPOT_RUN"):
        trainer.train()


def test_unknown_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="Unknown setting every"):
        SpotTrainerCallback("run", every="3 steps")
