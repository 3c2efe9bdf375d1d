"""The training that is disturbed: a real transformer with fused AdamW, and a loop bound by launching many small ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

# fp32 parameters with two moments: state bytes = 12 x parameters.
SIZES: dict[str, dict[str, int]] = {
    "10M": {"width": 96, "layers": 4, "heads": 4, "length": 64, "batch": 4},
    "100M": {"width": 288, "layers": 8, "heads": 4, "length": 128, "batch": 4},
    "1G": {"width": 768, "layers": 12, "heads": 12, "length": 128, "batch": 1},
}
VOCABULARY = 1000


class Transformer(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.place = nn.Parameter(torch.zeros(length, width))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.out = nn.Linear(width, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embed(tokens) + self.place
        for block in self.blocks:
            hidden = block(hidden)
        return self.out(hidden)


class Training:
    """`step(before_update)` does one optimizer step; `before_update` is called when the gradients are there."""

    def __init__(self, size: str) -> None:
        torch.manual_seed(0)
        shape = dict(SIZES[size])
        batch = shape.pop("batch")
        self.model = Transformer(**shape)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.tokens = torch.randint(0, VOCABULARY, (batch, shape["length"]))

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        logits = self.model(self.tokens)
        nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten()).backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=False)

    def state(self) -> dict[str, Any]:
        """What a checkpoint holds; made anew by each save, as a training framework does."""
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def stable(self) -> list[torch.Tensor]:
        """The tensors that only the optimizer changes."""
        moments = (v for s in self.optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
        return [*self.model.parameters(), *moments]


class Launches:
    """Many small tensors as state, and a loop that only launches tiny ops: it feels every wait for the GIL."""

    OPS = 2000

    def __init__(self, tensors: int, nbytes: int) -> None:
        torch.manual_seed(0)
        self._state = {f"t{i}": torch.randn(nbytes // tensors // 4) for i in range(tensors)}
        self._one = torch.ones(8)

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        value = self._one
        for _ in range(self.OPS):
            value = value.add(self._one)

    def state(self) -> dict[str, Any]:
        return self._state

    def stable(self) -> list[torch.Tensor]:
        return list(self._state.values())


def tensor_bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, dict):
        return sum(map(tensor_bytes, value.values()))
    if isinstance(value, (list, tuple)):
        return sum(map(tensor_bytes, value))
    return 0
