"""A data module whose training order is one global index: the same samples, however often it is interrupted."""

from __future__ import annotations

from typing import Any

from torch.utils.data import DataLoader

from lightning_spot import _compat
from spot_core.errors import ConfigError
from spot_core.pytorch.sampling import GlobalSampler

_BASE = _compat.datamodule_base()


class ResumableDataModule(_BASE):  # type: ignore[misc,valid-type]
    """Subclass it and return map-style data sets; the loaders are made here.

    Override `train_dataset`, and as needed `val_dataset`, `test_dataset`, `predict_dataset` (a data set, or a list of
    them) and `collate`. The order of epoch e is a function of (seed, e); rank r of w takes every w-th place of it, so a
    place in the epoch is one global sample offset. `batch_size` is per rank.

    A data set without a length, an iterable one, gets a ConfigError: it has no index to go back to.
    """

    def __init__(
        self,
        batch_size: int = 1,
        num_workers: int = 0,
        shuffle: bool = True,
        seed: int = 0,
        drop_last: bool = False,
        pin_memory: bool = False,
        persistent_workers: bool = False,
    ) -> None:
        super().__init__()
        if batch_size < 1:
            raise ConfigError(f"batch_size={batch_size} is not possible: give a whole number from 1.")
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.shuffle = shuffle
        self.seed = seed
        self.drop_last = drop_last
        self.pin_memory = pin_memory
        self.persistent_workers = persistent_workers

    def train_dataset(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} must define train_dataset()")

    def val_dataset(self) -> Any:
        return []

    def test_dataset(self) -> Any:
        return []

    def predict_dataset(self) -> Any:
        return []

    collate: Any = None
    """The loaders' `collate_fn`; None for torch's own."""

    def train_dataloader(self) -> DataLoader[Any]:
        data = self.train_dataset()
        rank, ranks = _compat.data_ranks(self.trainer) if self.trainer else (0, 1)
        sampler = GlobalSampler(
            _indexed(data),
            num_replicas=ranks,
            rank=rank,
            shuffle=self.shuffle,
            seed=self.seed,
            drop_last=self.drop_last,
        )
        return self._loader(data, sampler=sampler, drop_last=self.drop_last)

    def val_dataloader(self) -> Any:
        return self._loaders(self.val_dataset())

    def test_dataloader(self) -> Any:
        return self._loaders(self.test_dataset())

    def predict_dataloader(self) -> Any:
        return self._loaders(self.predict_dataset())

    def _loaders(self, data: Any) -> Any:
        if isinstance(data, (list, tuple)):
            return [self._loader(_indexed(part)) for part in data]
        return self._loader(_indexed(data))

    def _loader(self, data: Any, **keyword: Any) -> DataLoader[Any]:
        return DataLoader(
            data,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            collate_fn=self.collate,
            pin_memory=self.pin_memory,
            persistent_workers=self.persistent_workers and self.num_workers > 0,
            **keyword,
        )


def _indexed(data: Any) -> Any:
    if not hasattr(data, "__getitem__") or not hasattr(data, "__len__"):
        raise ConfigError(
            f"{type(data).__name__} is not a map-style data set: it has no index to go back to.",
            hint="Give it __len__ and __getitem__, or use a loader with state_dict and load_state_dict.",
        )
    return data
