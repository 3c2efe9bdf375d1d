"""What is put back when a training resumes, and when: the Trainer asks for it in the course of its own start."""

from __future__ import annotations

import os
from typing import Any

from accelerate_spot.reading import moved
from accelerate_spot.trainer import _compat, capture, resizing
from accelerate_spot.trainer.loaders import TrainingData
from spot_core.errors import ResumeMismatchError
from spot_core.pytorch import fits, modules, rng
from spot_core.pytorch.session import Resumed


class Restored:
    """One loaded generation, on one rank."""

    def __init__(self, resumed: Resumed, uri: str) -> None:
        state = resumed.state
        self.local = state.nearest
        self.world_size = state.world_size
        """Number of processes that saved it."""
        self.same_world = state.same_world
        self._local_of = state.local_of
        self.step = resumed.step
        self.finished = resumed.finished
        self.generation = resumed.generation
        self.name = f"{uri} generation {resumed.generation}"
        """Stands where the Trainer has the folder of a checkpoint."""
        self._shared = state.shared

    @property
    def epoch(self) -> int:
        return int(self.local["place"]["epoch"])

    @property
    def updates(self) -> int:
        """Optimizer steps done in that epoch."""
        return int(self.local["place"]["updates"])

    def batches(self, accumulation: int, data: TrainingData) -> int:
        """Batches of it that were trained on, in batches of the present number of processes."""
        if self.same_world:
            return int(self.local["place"]["batches"])
        return min(self.updates * accumulation, len(data.loader))

    def place(self, accumulation: int, data: TrainingData, world_size: int) -> dict[str, Any]:
        """In the data."""
        place: dict[str, Any] = self.local["data"]
        if self.same_world:
            return place
        resizing.check_order(place, data.loader, saved_world=self.world_size, world=world_size)
        return moved(place, data.view, world_size=world_size, batches=self.batches(accumulation, data))

    def load_model(self, trainer: Any) -> None:
        model = trainer.model
        saved = self._shared["model"]
        own = model.state_dict().keys()
        if own != saved.keys():
            present = {fits.plain_name(name): name for name in own}
            saved = {present.get(fits.plain_name(name), name): value for name, value in saved.items()}
        model.load_state_dict(saved)
        modules.set_buffers(model, self.local["buffers"])

    def load_optimizer_and_scheduler(self, trainer: Any) -> None:
        trainer.optimizer.load_state_dict(self._shared["optimizer"])
        trainer.lr_scheduler.load_state_dict(self.local["scheduler"])

    def load_scaler(self, trainer: Any) -> None:
        if self.local["scaler"] is not None and trainer.accelerator.scaler is not None:
            trainer.accelerator.scaler.load_state_dict(self.local["scaler"])

    def load_state(self, trainer: Any, updates_per_epoch: int) -> None:
        """TrainerState, and that of callbacks. Raises ResumeMismatchError for an epoch of another length."""
        saved = int(self.local["place"]["updates_per_epoch"])
        if saved != updates_per_epoch:
            raise ResumeMismatchError(
                f"{self.name}: an epoch had {saved} optimizer steps when it was saved and has {updates_per_epoch} now. "
                "Data set, batch size or gradient accumulation differ, so the place in the data is not the same one. "
                "Nothing was changed.",
                hint="Go back to the data and the batch size of the run, or give this job a run folder of its own.",
            )
        capture.set_state(trainer, self.local["state"])
        best = trainer.state.best_model_checkpoint
        if best is not None and not os.path.isdir(best):
            trainer.state.best_model_checkpoint = None  # as the Trainer does: it was deleted meanwhile
        capture.set_callback_states(trainer, self.local["callbacks"])

    def into_loop(self, trainer: Any) -> None:
        """The rest, when every `on_epoch_begin` is over. Random state comes last."""
        self._set_sums(trainer)
        capture.set_control(trainer, self.local["control"])
        modules.set_modes(trainer.model, self.local["modes"])
        rank = trainer.args.process_index
        saved = self.local["rng"] if self.same_world else None
        rng.resume(saved, seed=int(self.local["seed"]), step=self.step, rank=rank)

    def _set_sums(self, trainer: Any) -> None:
        """Each process has sums of its own; with another number of processes their mean and total are kept."""
        losses, flos = self.local["losses"], self.local["flos"]
        if not self.same_world:
            others = [self._local_of(rank) for rank in range(self.world_size)]
            losses = _compat.mean_losses([other["losses"] for other in others])
            # A float on each rank: they are gathered, and an int would be a tensor of another size.
            flos = float(sum(other["flos"] for other in others)) if trainer.args.process_index == 0 else 0.0
        _compat.set_losses(trainer, losses)
        _compat.set_own_values(trainer, self.local.get("own", {}))
        trainer.current_flos = flos

    def output(self, trainer: Any) -> _compat.TrainOutput:
        """What `train` returned when this training had finished; the trainer is left as it was left then."""
        self.load_model(trainer)
        capture.set_state(trainer, self.local["state"])
        capture.set_callback_states(trainer, self.local["callbacks"])
        modules.set_modes(trainer.model, self.local["modes"])
        rng.restore(self.local["rng"])
        trainer.is_in_train = False
        return _compat.TrainOutput(*self.local["output"])
