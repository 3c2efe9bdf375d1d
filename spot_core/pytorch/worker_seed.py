"""Random draws in DataLoader workers as a function of the batch, not of the worker's age.

A worker's generators go on from batch to batch, so a resumed worker, which starts anew, would augment differently. Here
every request carries a key, f(seed, rank, pass, batch), and the worker seeds python, numpy and torch from it before it
fetches; collation runs under the same seeds. Which worker serves the batch no longer matters.

A generator object that a data set keeps for itself (`self.rng`) is not reached by this.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset


@dataclass(frozen=True)
class KeyedIndex:
    """What the sampler asked for (an index, or a list of them) and the seed to fetch it under."""

    index: Any
    key: int


class KeyedDataset(Dataset[Any]):
    """The user's map-style data set, fetched under the key of each request. Everything else is the user's."""

    def __init__(self, user: Any) -> None:
        self.__dict__["keyed_user"] = user

    def __reduce__(self) -> Any:  # spawned workers: without it unpickling would ask __getattr__ for everything
        return KeyedDataset, (self.keyed_user,)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["keyed_user"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self.keyed_user, name, value)  # a worker_init_fn that configures "its" data set

    def __len__(self) -> int:
        return len(self.keyed_user)

    def __getitem__(self, request: KeyedIndex) -> Any:
        _seed(request.key)
        return self.keyed_user[request.index]

    def __getitems__(self, request: KeyedIndex) -> list[Any]:
        _seed(request.key)
        many = getattr(self.keyed_user, "__getitems__", None)
        if many:
            return list(many(request.index))
        return [self.keyed_user[index] for index in request.index]


def _seed(key: int) -> None:
    random.seed(key)
    np.random.seed(key % 2**32)  # the legacy global generator: what data sets draw from unless told otherwise
    torch.manual_seed(key)
