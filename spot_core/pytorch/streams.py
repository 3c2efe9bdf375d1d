"""Private random streams: python, numpy and torch CPU generators as values that can be put in place and taken away.

A sampler that draws from the global generators lazily, between the training's own draws, cannot be replayed from a
recorded global state. Under a stream of its own, seeded by (seed, pass), its order depends on nothing else.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor


def mix(*parts: int) -> int:
    """A 63-bit seed from integers of any size, equal on every machine (xxh3 of their decimal spelling)."""
    return xxhash.xxh3_64_intdigest(",".join(map(str, parts)).encode()) >> 1


@dataclass
class CpuRng:
    """State of the three CPU generators: python's `random`, numpy's legacy global one, torch's default one."""

    python: Any
    numpy: Any
    torch: Tensor

    @classmethod
    def capture(cls) -> CpuRng:
        return cls(random.getstate(), np.random.get_state(), torch.get_rng_state())

    @classmethod
    def seeded(cls, seed: int) -> CpuRng:
        """The states that seeding all three with `seed` would give; touches nothing global."""
        return cls(
            random.Random(seed).getstate(),
            np.random.RandomState(seed % 2**32).get_state(),
            torch.Generator().manual_seed(seed).get_state(),
        )

    def apply(self) -> None:
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)

    def to_state(self) -> dict[str, Any]:
        """Tensors and numbers only, so that it can be stored without pickle."""
        version, words, gauss = self.python
        name, keys, position, has_gauss, cached = self.numpy
        return {
            "python": {"version": version, "words": torch.tensor(words, dtype=torch.int64), "gauss": gauss},
            "numpy": {
                "name": str(name),
                "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
                "position": int(position),
                "has_gauss": int(has_gauss),
                "cached": float(cached),
            },
            "torch": self.torch.clone(),
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> CpuRng:
        py, np_ = state["python"], state["numpy"]
        return cls(
            (py["version"], tuple(py["words"].tolist()), py["gauss"]),
            (np_["name"], np_["keys"].numpy().astype(np.uint32), np_["position"], np_["has_gauss"], np_["cached"]),
            state["torch"],
        )


@contextmanager
def isolated(stream: CpuRng | None = None) -> Iterator[None]:
    """Run the body under `stream` (None: under the present states), then put the global states back."""
    outer = CpuRng.capture()
    if stream is not None:
        stream.apply()
    try:
        yield
    finally:
        outer.apply()


class StreamIterator(Iterator[Any]):
    """Draws each item of `source` under a private stream that starts at `seed`.

    With `torch_only` just torch's generator is exchanged (about 10 us a draw instead of 60): right for torch's own
    samplers, which draw from nothing else.
    """

    def __init__(self, source: Any, seed: int, *, torch_only: bool) -> None:
        self._source = source
        self._items: Iterator[Any] | None = None
        self._torch_only = torch_only
        self._stream = CpuRng.seeded(seed)

    def __next__(self) -> Any:
        if self._torch_only:
            outer = torch.get_rng_state()
            torch.set_rng_state(self._stream.torch)
            try:
                return self._draw()
            finally:
                self._stream.torch = torch.get_rng_state()
                torch.set_rng_state(outer)
        whole = CpuRng.capture()
        self._stream.apply()
        try:
            return self._draw()
        finally:
            self._stream = CpuRng.capture()
            whole.apply()

    def _draw(self) -> Any:
        if self._items is None:
            self._items = iter(self._source)
        return next(self._items)
