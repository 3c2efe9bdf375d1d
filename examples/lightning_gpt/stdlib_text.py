"""The text of Python's own standard library as a data set of byte windows: real text without a download."""

from __future__ import annotations

import sysconfig
from pathlib import Path

import torch
from lightning.pytorch import LightningDataModule
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset


def standard_library_text(size: int) -> bytes:
    """The first ``size`` bytes of the top-level modules' sources, in the order of their names."""
    text = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= size:
            return bytes(text[:size])
    raise ValueError(f"the standard library has only {len(text)} bytes of top-level sources, {size} were asked for")


class Windows(Dataset[tuple[int, Tensor]]):
    """Item ``i`` is ``(i, tokens)``, tokens the ``length + 1`` bytes from ``i * length`` on."""

    def __init__(self, text: bytes, length: int) -> None:
        self.tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.tokens) - 1) // self.length

    def __getitem__(self, index: int) -> tuple[int, Tensor]:
        start = index * self.length
        return index, self.tokens[start : start + self.length + 1].long()


class StdlibText(LightningDataModule):
    def __init__(
        self, windows: int = 3200, val_windows: int = 160, length: int = 64, batch_size: int = 16, num_workers: int = 0
    ) -> None:
        super().__init__()
        self.windows = windows
        self.val_windows = val_windows
        self.length = length
        self.batch_size = batch_size
        self.num_workers = num_workers

    def setup(self, stage: str) -> None:
        count = self.windows + self.val_windows
        data = Windows(standard_library_text(count * self.length + 1), self.length)
        self.train = Subset(data, range(self.windows))
        self.val = Subset(data, range(self.windows, count))

    def train_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.train, batch_size=self.batch_size, shuffle=True, num_workers=self.num_workers)

    def val_dataloader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        return DataLoader(self.val, batch_size=self.batch_size)
