"""Training loaders of one fit: each is shown to Lightning through a view that can say where it is."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils.data import DataLoader

from lightning_spot import _compat
from lightning_spot.resizing import Resizing
from spot_core.errors import ConfigError
from spot_core.pytorch.position import ResumableView, resumable
from spot_core.pytorch.streams import mix
from spot_core.pytorch.workers import protect

log = logging.getLogger(__name__)


class Loaders:
    """Wraps what `Strategy.process_dataloader` returns, in the order Lightning asks.

    `made` counts the loaders wrapped since the start of the fit, over all lives: with
    `reload_dataloaders_every_n_epochs` each new loader has an order of its own, the same after a resume.
    """

    def __init__(self, trainer: Any, seed: int) -> None:
        self._trainer = trainer
        self.seed = seed
        self.made = 0
        self.views: list[ResumableView] = []
        self.resizing: Resizing | None = None
        self._inside = False

    def around_setup(self, setup: Callable[..., Any]) -> Callable[..., Any]:
        """For `fit_loop.setup_data`: only what is processed inside of it are training loaders.

        (The trainer's stage does not tell: BatchSizeFinder sets up validation loaders while it says "training".)
        """

        def setup_data() -> None:
            self._inside = True
            try:
                setup()
            finally:
                self._inside = False
            if self.resizing is not None:
                self.resizing.data_ready()

        return setup_data

    def around_process(self, process: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """For `Strategy.process_dataloader`, which has seen all of Lightning's own changes to the loader."""

        def process_dataloader(dataloader: Any) -> Any:
            dataloader = process(dataloader)
            if self._inside:
                return self._wrap(dataloader)
            if isinstance(dataloader, DataLoader):
                _compat.seed_workers(self._trainer, dataloader)
                protect(dataloader)  # a notice during validation must not take the workers first
            return dataloader

        return process_dataloader

    def _wrap(self, loader: Any) -> Any:
        trainer = self._trainer
        number, self.made = self.made, self.made + 1
        _set_epoch(loader, trainer.fit_loop.epoch_progress.current.processed)
        if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
            workers = getattr(loader, "num_workers", 0)
            if workers and trainer.is_global_zero and number == 0:
                log.warning(
                    "the training loader is a %s with %d workers, whose random generators it cannot save: random "
                    "augmentation in them differs after a resume; a plain DataLoader is resumed exactly",
                    type(loader).__name__, workers,
                )
        rank, ranks = _compat.data_ranks(trainer)
        view = resumable(
            loader,
            seed=mix(self.seed, number),
            rank=rank,
            world_size=ranks,
            deal=None if self.resizing is None else self.resizing.deal(number),
        )
        if self.resizing is not None:
            self.resizing.loader_made(view)
        self.views.append(view)
        return view

    def training_starts(self) -> None:
        """Refuse what cannot be placed, and let the views keep what fetching ahead needs."""
        if _compat.hands_out_iterator(self._trainer):
            raise ConfigError(
                "training_step(dataloader_iter) fetches its batches itself, so it cannot be known which of them were "
                "trained on when a checkpoint is taken.",
                hint="Take the batch as an argument instead: training_step(self, batch, batch_idx).",
            )
        ahead = _compat.looks_ahead(self._trainer)
        for view in self.views:
            view.look_ahead = ahead

    def before_dump(self) -> None:
        """Tell the views how many batches were fetched but not trained on; Lightning asks for their states next."""
        behind = _compat.fetched_ahead(self._trainer)
        for view in self.views:
            view.behind = behind

    def position(self) -> dict[str, Any]:
        """For the manifest: passes and global sample offsets of the loaders that count samples."""
        places = [view.state_dict() for view in self.views]
        shown = ("pass", "batches", "offset")
        return {"loaders": [{key: place[key] for key in shown if key in place} for place in places]}


def _set_epoch(loader: Any, epoch: int) -> None:
    """Lightning builds the iterator of a resumed fit before it tells the sampler which epoch it is."""
    batch_sampler = getattr(loader, "batch_sampler", None)
    for sampler in (getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None), batch_sampler):
        set_epoch = getattr(sampler, "set_epoch", None)
        if callable(set_epoch):
            set_epoch(epoch)
