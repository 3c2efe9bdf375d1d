"""What is put back when a fit resumes, and when: the loaded checkpoint first, the rest when training starts."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

from lightning_spot import _compat, _compat_metrics, progress
from spot_core.clock import SYSTEM_CLOCK
from spot_core.pytorch import fits, modules, rng
from spot_core.pytorch.session import Resumed

log = logging.getLogger(__name__)


class Restored:
    """One loaded generation, on one rank."""

    def __init__(self, resumed: Resumed, trainer: Any) -> None:
        state = resumed.state
        local = state.nearest
        self._state, self._rank = state, int(trainer.global_rank)
        self._data_rank, ranks = _compat.data_ranks(trainer)
        # Ranks that read the same data draw alike; those of groups of another size did so with other ranks.
        alike = state.world_size // local["batches"]["ranks"] == int(trainer.world_size) // ranks
        self._rng = state.local["rng"] if alike and state.local is not None else None
        self.generation = resumed.generation
        self.finished = resumed.finished
        self.step = int(local["step"])
        self.local = local
        self._shared = resumed.state.shared
        self.places = local["checkpoint"]["loops"]["fit_loop"]["state_dict"].get("combined_loader", [])

    def checkpoint(self, module: Any) -> dict[str, Any]:
        """The dict that Lightning loads, repaired so that it goes on at the very next event.

        `module` gives the names of today; None where the state was loaded by name into what there is.
        """
        state = {**self._shared, **self.local["checkpoint"]}
        if module is not None:
            state["state_dict"] = _names_of(module, state["state_dict"])
        if self.finished:
            # The end of the last epoch is behind it; should the user train longer now, the next pass begins.
            loop = state["loops"]["fit_loop"]["state_dict"]
            loop.pop("combined_loader", None)
            if all("kind" in place for place in self.places):
                loop["combined_loader"] = [{**place, "ended": True} for place in self.places]
        else:
            flags = self.local["flags"]
            progress.repair(state, validation_due=flags["validation_due"], last_batch=flags["last_batch"])
        return copy.copy(state)

    def early_rng(self) -> None:
        """First of two times: what is set up before training starts may draw (iterators of a new epoch)."""
        rng.resume(self._rng, seed=self.local["loaders"]["seed"], step=self.step, rank=self._data_rank)

    def when_training_starts(self, trainer: Any, module: Any, loaders_placed: Callable[[], None]) -> None:
        """The rest, after every `on_train_start`, before the first batch is fetched. Random state comes last."""
        local = self.local
        if local["validation_made"]:
            _compat.prepare_validation(trainer)
        _compat.take_up_loaders(trainer)
        if not self.finished:
            loaders_placed()
        self._buffers_and_gradients(module)
        _compat.set_clocks(trainer, local["clocks"], SYSTEM_CLOCK.monotonic())
        if not self.finished:
            self._inside_epoch(trainer, module)
        if self._rng is not None:
            rng.restore(self._rng)
        else:
            rng.reseed(local["loaders"]["seed"], self.step, self._data_rank)

    def _buffers_and_gradients(self, module: Any) -> None:
        modules.set_buffers(module, self.local["buffers"])
        parameters = dict(module.named_parameters())
        for name, saved in self.local["gradients"].items():
            parameters[name].grad = saved.to(parameters[name].device)

    def _inside_epoch(self, trainer: Any, module: Any) -> None:
        local = self.local
        if local["flags"]["last_batch"]:
            _compat.end_epoch_data(trainer, self.places)
        else:
            _compat.set_cycle_flags(trainer, local["cycle"])
        modules.set_modes(module, local["modes"])
        _compat_metrics.restore_metric_state(trainer, module, self._metrics(trainer, module))
        trainer.should_stop = trainer.should_stop or local["should_stop"]
        if local["flags"]["validation_due"]:
            _compat.settle_validation_progress(trainer)
        elif any(config.reduce_on_plateau and config.interval == "step" for config in trainer.lr_scheduler_configs):
            _compat.step_plateau_schedulers(trainer)


    def _metrics(self, trainer: Any, module: Any) -> Any:
        """This rank's running metrics; of another number of ranks, those of every so many of them."""
        saved, ranks = self._state.world_size, int(trainer.world_size)
        if saved == ranks:
            return self.local["metrics"]
        mine = [self._state.local_of(other)["metrics"] for other in range(self._rank, saved, ranks)]
        if mine:
            return _compat_metrics.merge_metric_states(module, mine)
        return {**self.local["metrics"], "results": {}, "modules": {}}


def _names_of(module: Any, state: dict[str, Any]) -> dict[str, Any]:
    """The saved state under the module's present names, which `torch.compile` may have changed."""
    own = module.state_dict().keys()
    if own == state.keys():
        return state
    present = {fits.plain_name(name): name for name in own}
    return {present.get(fits.plain_name(name), name): value for name, value in state.items()}
