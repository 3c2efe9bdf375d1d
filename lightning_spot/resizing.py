"""A fit that goes on with another number of ranks: its global batches kept by accumulation, or the change accepted.

Kept: every loader deals the blocks of the ranks that the run began with (`spot_core.pytorch.deal`) in `splits` times as
many batches. Everything of the trainer that counts batches is multiplied with that, and the loss of a batch is weighted
by its share of the block, so that optimizer steps, and all that follows them, are those of the run as it was.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from lightning_spot import _compat
from spot_core.errors import ConfigError, TopologyError
from spot_core.pytorch.deal import Deal
from spot_core.pytorch.position import ResumableView, deal_of

log = logging.getLogger(__name__)


class Resizing:
    """One fit's. The data were shared out to `ranks` when it was saved, at `places` (rank 0's loaders' ones).

    `splits` and `accumulate`: batches per batch of the run, and the run's own accumulation, as of then.
    """

    def __init__(
        self, trainer: Any, *, on_resize: str, places: Sequence[Any], ranks: int, splits: int, accumulate: int
    ) -> None:
        self._trainer, saved = trainer, ranks
        self._accepts = on_resize == "accept"
        self._was_splits, self._accumulate = splits, accumulate
        _, self._ranks = _compat.data_ranks(trainer)
        self._deals: list[Deal | None] = []
        for number, place in enumerate(places):
            speaks = number == 0 and bool(trainer.is_global_zero)
            self._deals.append(deal_of(place, on_resize=on_resize, saved=saved, world=self._ranks, speaks=speaks))
        if saved != self._ranks and len(places) > 1:
            raise TopologyError(
                f"The fit has {len(places)} training loaders side by side, and was saved by {saved} ranks: what each "
                "of them had read cannot be shared out anew.",
                hint=f"Start {saved} ranks, or combine the data sets into one.",
            )
        self.splits = 1
        self._scaled = False
        self._undo: list[tuple[Any, str, Any]] = []
        self._short: tuple[int, float] | None = None

    def deal(self, number: int) -> Deal | None:
        return self._deals[number % len(self._deals)] if self._deals else None

    @property
    def keeps(self) -> bool:
        return any(deal is not None for deal in self._deals)

    def loader_made(self, view: ResumableView) -> None:
        """Before Lightning asks the loader for its length: scale what counts batches."""
        if self._scaled or not self.keeps:
            return
        self._scaled = True
        trainer, self.splits = self._trainer, view.splits
        if not trainer.lightning_module.automatic_optimization and not _even(self._deals, self._ranks):
            raise ConfigError(
                "The module steps its optimizers by itself (manual optimization), so its gradients cannot be "
                "accumulated over the micro-batches that keep the global batch.",
                hint="Set on_resize='accept', or start the number of ranks of the run.",
            )
        self._set(trainer, "accumulate_grad_batches", self._accumulate * self.splits)
        for name in ("limit_train_batches", "val_check_interval"):
            if isinstance(getattr(trainer, name), int):
                self._set(trainer, name, getattr(trainer, name) * self.splits)
        for callback in trainer.callbacks:
            if _compat.is_instance(trainer, callback, "GradientAccumulationScheduler"):
                scaled = {epoch: number * self.splits for epoch, number in callback.scheduling.items()}
                self._set(callback, "scheduling", scaled)
        if self.splits > 1 and trainer.is_global_zero:
            log.warning(
                "spot: each batch of the run is %d micro-batches now (accumulate_grad_batches=%d), weighted by their "
                "samples; this is exact for losses that are means over the batch",
                self.splits, trainer.accumulate_grad_batches,
            )

    def data_ready(self) -> None:
        """After Lightning worked out when to validate: at the same steps as before."""
        trainer = self._trainer
        batches, share = trainer.num_training_batches, trainer.val_check_interval
        if self.splits > 1 and isinstance(share, float) and batches != float("inf"):
            trainer.val_check_batch = max(1, int(batches // self.splits * share)) * self.splits

    def training_starts(self, views: Sequence[ResumableView]) -> None:
        """The loaders are at their places: let the loops count in the batches of the ranks that there are now."""
        trainer = self._trainer
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step":
                self._set(config, "frequency", config.frequency * self.splits)
        left = views[0].batches_left if len(views) == 1 else None
        if left is None:
            return
        ready, before = len(views[0]) - left, _compat.batches_ready(trainer)
        if ready == before and self.splits == self._was_splits:
            return
        accumulate = int(trainer.accumulate_grad_batches)
        whole = ready % accumulate == 0 or left == 0
        _compat.set_batches_ready(
            trainer,
            ready,
            scale=(self.splits, self._was_splits) if self.keeps else None,
            stepped=not whole,
        )
        if not whole:  # the first step has fewer batches than the loss is divided by
            self._short = (int(trainer.global_step), accumulate / (accumulate - ready % accumulate))

    def around_backward(
        self, backward: Callable[..., Any], views: Sequence[ResumableView]
    ) -> Callable[..., Any]:
        """For `Strategy.backward`, which has the loss after Lightning divided it by the number of batches."""

        def weighted_backward(loss: Any, *args: Any, **kwargs: Any) -> Any:
            weight = views[-1].weight if views else 1.0
            if self._short is not None and self._trainer.global_step == self._short[0]:
                weight *= self._short[1]
            return backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)

        return weighted_backward

    def around_schedule(self, step: Callable[..., Any]) -> Callable[..., Any]:
        """For the module's `lr_scheduler_step`: where the global batch may shrink, there are more steps than a schedule
        of fixed length (OneCycleLR) was made for, and its next one would end the training with an error."""
        ended: list[Any] = []

        def held_at_its_end(scheduler: Any, *args: Any, **kwargs: Any) -> Any:
            total = getattr(scheduler, "total_steps", None)
            if total is None or scheduler.last_epoch < total:
                return step(scheduler, *args, **kwargs)
            if scheduler not in ended:
                ended.append(scheduler)
                log.warning(
                    "spot: %s has had its %d steps, and the changed global batch needs more: its learning rate stays "
                    "what it is at its end",
                    type(scheduler).__name__, total,
                )
            return None

        return held_at_its_end if self._accepts else step

    def _set(self, owner: Any, name: str, value: Any) -> None:
        self._undo.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)

    def close(self) -> None:
        """The trainer outlives the fit."""
        while self._undo:
            owner, name, value = self._undo.pop()
            setattr(owner, name, value)


def _even(deals: Sequence[Deal | None], world: int) -> bool:
    """Whether each rank takes its share of every block at once."""
    return all(deal is None or deal.origin == world for deal in deals)
