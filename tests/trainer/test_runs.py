"""Which run a training belongs to: finished ones, several in one script, the Trainer's own checkpoints (R1, L3)."""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback

from spot_core.errors import ConfigError, ResumeMismatchError
from spot_core.pytorch import fits
from spot_core.run import Run

from ._harness import Job, Killed, Recorded, Samples, assert_continues, assert_equal, model

noisy = partial(Samples, augment=True)
BEST = {
    "save_strategy": "steps",
    "save_steps": 2,
    "eval_steps": 2,
    "save_total_limit": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "loss",
    "num_train_epochs": 4,
    "learning_rate": 0.5,
}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_a_finished_training_is_not_run_again(tmp_path: Path) -> None:
    job = Job(noisy, evaluate="epoch")
    first = job.start(tmp_path)
    before = files(tmp_path / "run")
    after_first = torch.rand(3)
    again = job.start(tmp_path, seed=99)
    assert again.trainer.ids == []
    assert again.events == []
    assert_equal(dict(again.trainer.model.state_dict()), dict(first.trainer.model.state_dict()), "weights")
    assert tuple(again.result) == tuple(first.result)
    assert again.trainer.state.log_history == first.trainer.state.log_history
    assert torch.equal(torch.rand(3), after_first), "what the script draws next"
    assert files(tmp_path / "run") == before
    assert again.trainer.is_in_train is False


def test_the_best_model_and_its_limit_leave_the_run_alone(tmp_path: Path) -> None:
    """save_total_limit=1, best model, early stop: the Trainer deletes its own newest checkpoint, not ours."""
    job = Job(noisy, evaluate="steps", arguments=BEST, callbacks=lambda: [EarlyStoppingCallback(2)])
    control = job.start(tmp_path / "control")
    steps = control.trainer.state.global_step
    assert steps < 44, "it was not stopped early"
    best = control.trainer.state.best_global_step
    assert best < steps - 2
    lives = [job.start(tmp_path / "job", every=f"{steps - 1} steps", kill=steps - 1)]
    assert lives[0].killed
    assert Run.open(tmp_path / "job" / "run").discover().generations[0].id.step == steps - 1
    lives.append(job.start(tmp_path / "job", seed=99))
    assert_equal([i for life in lives for i in life.trainer.ids], control.trainer.ids, "ids")
    assert lives[-1].trainer.state.best_global_step == best
    assert_equal(dict(lives[-1].trainer.model.state_dict()), dict(control.trainer.model.state_dict()), "best weights")
    assert [path.name for path in (tmp_path / "job" / "out").iterdir()] == [f"checkpoint-{best}"]
    shutil.rmtree(tmp_path / "job" / "out")
    again = job.start(tmp_path / "job")
    assert again.trainer.ids == []
    assert_equal(dict(again.trainer.model.state_dict()), dict(control.trainer.model.state_dict()), "without its files")


@pytest.mark.parametrize("kill", [4, 5])
def test_the_checkpoints_of_the_trainer_are_written_as_before(tmp_path: Path, kill: int) -> None:
    """One that was due at the saved step is written after the resume; and it resumes a training of its own."""
    job = Job(noisy, arguments={"save_strategy": "steps", "save_steps": 4, "save_total_limit": 2})
    assert_continues(job, tmp_path, [kill])
    names = [sorted(path.name for path in (tmp_path / part / "out").iterdir()) for part in ("control", "job")]
    assert names == [["checkpoint-20", "checkpoint-22"]] * 2
    for name in ("model.safetensors", "optimizer.pt", "scheduler.pt", "rng_state.pth"):
        one, other = (tmp_path / part / "out" / "checkpoint-20" / name for part in ("control", "job"))
        if name.endswith("pt"):
            one, other = (torch.load(path, weights_only=True) for path in (one, other))  # type: ignore[assignment]
            assert_equal(other, one, name)
        elif name.endswith("safetensors"):
            assert one.read_bytes() == other.read_bytes()
        else:
            assert other.stat().st_size > 0


def test_the_run_wins_over_a_checkpoint_that_is_given(tmp_path: Path) -> None:
    job = Job(noisy, arguments={"save_strategy": "steps", "save_steps": 4})
    control = job.start(tmp_path / "control")
    at = tmp_path / "job"
    first = job.start(at, every="7 steps", kill=7, resume_from_checkpoint=True)  # nothing is there yet
    assert first.killed
    (at / "out" / "checkpoint-4" / "trainer_state.json").unlink()  # torn, and nobody minds
    done = job.start(at, seed=99, resume_from_checkpoint=True)
    assert_equal(first.trainer.ids + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(done.state, control.state, "state")


@pytest.mark.parametrize("kill", [10, 13])
def test_a_checkpoint_that_is_given_begins_a_new_run(tmp_path: Path, kill: int) -> None:
    """Without a generation the Trainer's own way to resume is left to it, and the run goes on from there."""
    job = Job(arguments={"save_strategy": "steps", "save_steps": 4})
    control = job.start(tmp_path / "control")
    checkpoint = str(tmp_path / "control" / "out" / "checkpoint-8")
    first = job.start(tmp_path / "job", every=f"{kill} steps", kill=kill, resume_from_checkpoint=checkpoint)
    assert len(first.trainer.ids) == kill - 8
    done = job.start(tmp_path / "job", seed=99, resume_from_checkpoint=checkpoint)
    assert_equal(first.trainer.ids + done.trainer.ids, control.trainer.ids[8:], "ids")
    assert done.trainer.state.global_step == 22


def folds(at: Path, *, kill_in: int | None = None) -> list[Any]:
    """A script with three trainings; it dies in training `kill_in` after its step 3."""
    made = []
    for number in range(3):
        job = Job(noisy, arguments={"num_train_epochs": 1, "seed": number})
        before = dict(fits._returned)
        kill = {"kill": 3, "every": "3 steps"} if number == kill_in else {}
        outcome = job.start(at, continued=before, **kill)
        if outcome.killed:
            raise Killed
        made.append(outcome)
    return made


def test_each_training_of_a_script_has_its_own_state(tmp_path: Path) -> None:
    control = folds(tmp_path / "control")
    fits._returned.clear()
    with pytest.raises(Killed):
        folds(tmp_path / "job", kill_in=1)
    fits._returned.clear()
    resumed = folds(tmp_path / "job")
    assert [len(one.trainer.ids) for one in control] == [11, 11, 11]
    assert [len(one.trainer.ids) for one in resumed] == [0, 8, 11]
    for one, wanted in zip(resumed, control, strict=True):
        assert_equal(dict(one.trainer.model.state_dict()), dict(wanted.trainer.model.state_dict()), "weights")
    parts = ("", "fit-0001", "fit-0002")
    newest = [Run.open(tmp_path / "job" / "run" / part).discover().generations[0] for part in parts]
    assert [committed.manifest.finished for committed in newest] == [True] * 3


def test_a_torn_newest_generation_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job = Job(noisy)
    control = job.start(tmp_path / "control")
    first = job.start(tmp_path / "job", every="3 steps", kill=6)
    [blob] = (tmp_path / "job" / "run" / "generations").glob("*6/*.blob")
    blob.write_bytes(blob.read_bytes()[:-7])
    done = job.start(tmp_path / "job", seed=99)
    assert "passed over" in caplog.text or "torn" in caplog.text
    assert_equal(first.trainer.ids[:3] + done.trainer.ids, control.trainer.ids, "ids")
    assert_equal(done.state, control.state, "state")


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"enable_jit_checkpoint": True}, ConfigError, "enable_jit_checkpoint"),
        ({"per_device_train_batch_size": 11}, ResumeMismatchError, "an epoch had 11 optimizer steps"),
        ({"gradient_accumulation_steps": 2}, ResumeMismatchError, "an epoch had 11 optimizer steps"),
    ],
)
def test_what_cannot_be_continued_is_refused(
    tmp_path: Path, arguments: dict[str, Any], error: type[Exception], says: str
) -> None:
    Job(noisy).start(tmp_path, every="3 steps", kill=3)
    before = files(tmp_path / "run")
    with pytest.raises(error, match=says):
        Job(noisy, arguments=arguments).start(tmp_path)
    assert files(tmp_path / "run") == before


class Small(Recorded):
    """Has room for `room` samples."""

    room = 2

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if len(inputs["index"]) > self.room:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(model, inputs, *args, **kwargs)


def test_the_batch_size_that_was_found_is_kept(tmp_path: Path) -> None:
    arguments = {"auto_find_batch_size": True, "per_device_train_batch_size": 4}
    job = Job(noisy, arguments=arguments, trainer=Small)
    control, _ = assert_continues(job, tmp_path, [3])
    assert {len(ids) for ids in control.trainer.ids} == {2}
    Job(noisy, arguments=arguments, trainer=Small).start(tmp_path / "other", every="3 steps", kill=3)

    class Smaller(Small):
        room = 1

    with pytest.raises(ResumeMismatchError, match="batches of 2 per device, which do not fit now"):
        Job(noisy, arguments=arguments, trainer=Smaller).start(tmp_path / "other")


def test_another_model_is_refused(tmp_path: Path) -> None:
    Job(noisy).start(tmp_path, every="3 steps", kill=3)

    def other() -> Any:
        made = model()
        made.resize_token_embeddings(70)
        return made

    with pytest.raises(ResumeMismatchError, match="another model"):
        Job(noisy, model=other).start(tmp_path)


def test_files_of_the_trainer_do_not_go_into_the_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="inside the run"):
        Job(arguments={"output_dir": str(tmp_path / "run" / "out")}).start(tmp_path)
