"""Split the state of one save after the other: what lies where it lay at the save before is recognised, not looked at.

From save to save only values change, so nearly every tensor is the same memory read the same way, though often a new
Python object (`Module.state_dict` makes new ones by each call). A tensor is recognised by its path and its view of the
memory; the memory is kept alive here, so that an equal address is the same one. When all of a state is recognised, its
tensors are the very object of the save before, which spares the planner its own questions too. One tensor that is not,
and the state is taken apart anew: which tensors are tied can only be said of all of them together.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from spot_core.pytorch.codec import KIND
from spot_core.pytorch.form import Form, Unknown
from spot_core.pytorch.plan import SameTensors
from spot_core.pytorch.state import PLAIN_TENSORS, Split, Splitter

__all__ = ["Resplitter"]


_Known = tuple[dict[str, Any], type[torch.Tensor], int, torch.Size, tuple[int, ...], torch.dtype, bool, bool]
"""The node of a tensor in the tree, and how it reads its memory: address, shape, strides, dtype, whether it requires
gradients, and whether another that reads it so may be conjugated or negated (a bit that no other question shows)."""


class Resplitter:
    """`split` for a state that is taken apart again and again."""

    def __init__(self) -> None:
        self._known: dict[str, _Known] = {}
        self._tensors = SameTensors()
        self._form: Form | None = None
        self._outside = 0

    def split(self, value: Any, *, droppable: Collection[str] = (), allow_pickle: bool = False) -> Split:
        """As `state.split`. The returned tensors are the same object as before when only values changed."""
        if self._form is not None:
            again = _Again(droppable, allow_pickle, self._known)
            try:
                tree = self._form.again(value, again.encode)
            except (Unknown, RuntimeError):
                pass  # taken apart anew, which says what is wrong if something is
            else:
                if again.found == self._outside and not again.objects:
                    return Split(tree, self._tensors, {})
        self.forget()
        first = _First(droppable, allow_pickle)
        found = first.split(value)
        if not first.plain or found.objects:
            return found
        outside = _Again(droppable, allow_pickle, first.known)
        try:
            self._form = Form.of(value, found.tree, outside.encode)
        except (Unknown, RuntimeError):
            return found
        self._outside = outside.found
        self._known, self._tensors = first.known, SameTensors(found.tensors)
        return Split(found.tree, self._tensors, found.objects)

    def forget(self) -> None:
        """Let go of the memory of the state."""
        self._known, self._tensors, self._form = {}, SameTensors(), None


class _First(Splitter):
    def __init__(self, droppable: Collection[str], allow_pickle: bool) -> None:
        super().__init__(droppable, allow_pickle)
        self.known: dict[str, _Known] = {}
        self.plain = True
        """Whether each tensor can be recognised by how it reads its memory."""

    def tensor(self, value: torch.Tensor, path: str) -> Any:
        node = super().tensor(value, path)
        plain = type(value) in PLAIN_TENSORS and node[KIND] == "tensor" and not _is_lazy(value)
        if not plain or not value.data_ptr():
            self.plain = False
        else:
            self.known[path] = (
                node,
                type(value),
                value.data_ptr(),
                value.shape,
                value.stride(),
                value.dtype,
                value.requires_grad,
                # Real numbers are negated lazily as the imaginary parts of conjugates alone, which are not contiguous.
                value.is_complex() or value.numel() < 2 or not value.is_contiguous(),
            )
        return node


class _Again(Splitter):
    """For what the form does not look into: its tensors are known by their paths."""

    def __init__(self, droppable: Collection[str], allow_pickle: bool, known: dict[str, _Known]) -> None:
        super().__init__(droppable, allow_pickle)
        self._known = known
        self.found = 0

    def encode(self, value: Any, path: str) -> Any:
        # A tensor without memory of its own (a sparse one) raises RuntimeError when asked for its address.
        known = self._known.get(path)
        if known is None:
            return super().encode(value, path)
        node, cls, address, shape, stride, dtype, requires_grad, may_be_lazy = known
        if (
            type(value) is not cls
            or value.data_ptr() != address
            or value.shape != shape
            or value.stride() != stride
            or value.dtype is not dtype
            or value.requires_grad is not requires_grad
            or (may_be_lazy and _is_lazy(value))
        ):
            raise Unknown
        self.found += 1
        return node

    def tensor(self, value: torch.Tensor, path: str) -> Any:
        raise Unknown

    def store(self, tensor: torch.Tensor, path: str) -> str:
        raise Unknown  # of something made anew by each split: an array, a shard


def _is_lazy(value: torch.Tensor) -> bool:
    return value.is_conj() or value.is_neg()
