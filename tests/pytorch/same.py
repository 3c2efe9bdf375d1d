"""Equality that tells apart everything `==` does not: types, nan payloads, dtypes, strides' order, attributes."""

from __future__ import annotations

import collections
import decimal
import struct
from typing import Any

import numpy as np
import torch


def bits(tensor: torch.Tensor) -> bytes:
    """The values of a tensor as bytes, row-major."""
    if tensor.is_sparse:
        return bits(tensor.coalesce().indices()) + bits(tensor.coalesce().values())
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same(one: Any, other: Any) -> bool:
    """True when both are the same value of the same type, bit for bit, all the way down."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and bits(one) == bits(other)
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return factories and len(one) == len(other) and all(map(same, one.items(), other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, collections.deque):
        return one.maxlen == other.maxlen and same(list(one), list(other))
    if isinstance(one, (set, frozenset)):
        # `True == 1` inside sets as well: compare by type and value.
        return collections.Counter(map(_typed, one)) == collections.Counter(map(_typed, other))
    if hasattr(one, "fold") and (one.fold, one.tzinfo) != (other.fold, other.tzinfo):
        return False
    if isinstance(one, decimal.Decimal):
        return repr(one) == repr(other)  # nan equals nothing
    return bool(one == other)


def _typed(value: Any) -> tuple[str, str]:
    return type(value).__name__, repr(value)
