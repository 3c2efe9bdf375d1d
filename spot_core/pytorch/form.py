"""The form of a state: where in it the tensors stand, how they read their memory, and what stands beside them.

Asked at every save, on the training's thread, whose caches are full of other things: so it asks what C code answers for
many values at a time. Plain values are compared by their `marshal` bytes, which tell apart what `==` does not (1 and
True, 0.0 and -0.0, nan and nan) and exist for the exact built-in types alone.
"""

from __future__ import annotations

import marshal
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import attrgetter, eq
from typing import Any, TypeAlias

import torch

from spot_core.pytorch.codec import KIND
from spot_core.pytorch.state import PLAIN_TENSORS, key_name, sub_path

__all__ = ["Form", "Unknown"]

_SCALARS = (type(None), bool, int, float, str)
_KEYS = (frozenset({str}), frozenset({int}))
_dtype, _requires_grad = attrgetter("dtype"), attrgetter("requires_grad")

Steps: TypeAlias = tuple[Any, ...]
"""Keys and positions that lead from the root of a tree to one of its nodes."""

Encode: TypeAlias = Callable[[Any, str], Any]
"""`encode(value, path)` is the node of what stands at `path`; it raises Unknown for tensors that were not there."""


class Unknown(Exception):
    """Something that the save before did not hold in this place."""


@dataclass(frozen=True)
class _Leaf:
    """No container that is looked into; `marshalled` for a plain value, None for another."""

    path: str
    steps: Steps
    marshalled: bytes | None


@dataclass(frozen=True)
class _Box:
    """A container with tensors in it."""

    cls: type
    keys: list[Any]
    """Of a dict; empty for a list or tuple."""
    key_types: frozenset[type]
    parts: tuple[_Part, ...]
    only_tensors: bool
    attributes: _Part = None


_Part: TypeAlias = "_Box | _Leaf | None"
"""None stands for a tensor."""


@dataclass
class _Readings:
    """How tensors read their memory, question by question."""

    classes: list[type]
    addresses: list[int]
    shapes: list[torch.Size]
    strides: list[tuple[int, ...]]
    dtypes: list[torch.dtype]
    requires_grad: list[bool]

    @classmethod
    def of(cls, tensors: list[torch.Tensor]) -> _Readings:
        return cls(
            list(map(type, tensors)),
            list(map(torch.Tensor.data_ptr, tensors)),
            list(map(torch.Tensor.size, tensors)),
            list(map(torch.Tensor.stride, tensors)),
            list(map(_dtype, tensors)),
            list(map(_requires_grad, tensors)),
        )

    def same(self, tensors: list[torch.Tensor]) -> bool:
        # The classes first: the other questions are for tensors. Their answers are not kept, so that each takes the
        # memory of the one before, and hundreds of tuples are nothing for the garbage collector to look at.
        return list(map(type, tensors)) == self.classes and (
            all(map(eq, map(torch.Tensor.data_ptr, tensors), self.addresses))
            and all(map(eq, map(torch.Tensor.size, tensors), self.shapes))
            and all(map(eq, map(torch.Tensor.stride, tensors), self.strides))
            and all(map(eq, map(_dtype, tensors), self.dtypes))
            and all(map(eq, map(_requires_grad, tensors), self.requires_grad))
        )


@dataclass
class Form:
    """Of the state that `of` was given, and of its tree."""

    tree: Any
    _root: _Part
    _readings: _Readings
    _may_be_lazy: list[int]
    """Positions of those that another tensor with the same reading may hold conjugated or negated: a bit that no other
    question shows. Real numbers are negated lazily as the imaginary parts of conjugates, which are not contiguous."""

    @classmethod
    def of(cls, value: Any, tree: Any, encode: Encode) -> Form:
        """Raises Unknown where `encode` does."""
        tensors: list[torch.Tensor] = []
        root = _part(value, tree, "", (), tensors, encode)
        lazy = [i for i, t in enumerate(tensors) if t.is_complex() or t.numel() < 2 or not t.is_contiguous()]
        return cls(tree, root, _Readings.of(tensors), lazy)

    def again(self, value: Any, encode: Encode) -> Any:
        """The tree of `value`, whose tensors read the same memory in the same way: the very same one when the plain
        values are the same as well. Raises Unknown when it is another state."""
        look = _Look(encode)
        look.at(self._root, value)
        if not self._readings.same(look.tensors):
            raise Unknown
        lazy = [look.tensors[i] for i in self._may_be_lazy]
        if any(map(torch.Tensor.is_neg, lazy)) or any(map(torch.Tensor.is_conj, lazy)):
            raise Unknown
        tree = self.tree
        for steps, node in look.changed:
            tree = _with(tree, steps, node)
        return tree


@dataclass
class _Look:
    encode: Encode
    tensors: list[torch.Tensor] = field(default_factory=list)
    changed: list[tuple[Steps, Any]] = field(default_factory=list)

    def at(self, part: _Part, value: Any) -> None:
        if part is None:
            self.tensors.append(value)
        elif isinstance(part, _Box):
            self._box(part, value)
        elif part.marshalled is None or part.marshalled != _marshalled(value):
            self.changed.append((part.steps, self.encode(value, part.path)))

    def _box(self, box: _Box, value: Any) -> None:
        cls: type = type(value)
        if cls is not box.cls:
            raise Unknown
        values: Any = value
        if box.key_types:
            if list(value) != box.keys or not box.key_types.issuperset(map(type, value)):
                raise Unknown
            values = value.values()
            if box.cls is OrderedDict:
                if bool(vars(value)) != (box.attributes is not None):
                    raise Unknown
                if box.attributes is not None:
                    self.at(box.attributes, vars(value))
        elif len(value) != len(box.parts):
            raise Unknown
        if box.only_tensors:
            self.tensors.extend(values)
        else:
            for part, item in zip(box.parts, values, strict=True):
                self.at(part, item)


def _part(value: Any, node: Any, path: str, steps: Steps, tensors: list[torch.Tensor], encode: Encode) -> _Part:
    cls = type(value)
    if cls in PLAIN_TENSORS:
        tensors.append(value)
        return None
    if _is_plain(dict(value) if cls is OrderedDict and not vars(value) else value):
        return _Leaf(path, steps, _marshalled(value))
    if cls in (dict, OrderedDict):
        key_types = next((types for types in _KEYS if types.issuperset(map(type, value))), frozenset[type]())
        if not key_types:
            return _leaf(value, path, steps, encode)
        names = [sub_path(path, key_name(key, i)) for i, key in enumerate(value)]
        ways: list[Steps] = [("items", i, 1) if KIND in node else (key,) for i, key in enumerate(value)]
        values, attributes = list(value.values()), None
        if cls is OrderedDict and vars(value):
            way = (*steps, "attributes")
            attributes = _part(vars(value), node["attributes"], sub_path(path, "(attributes)"), way, tensors, encode)
    elif cls in (list, tuple):
        key_types, attributes, values = frozenset(), None, list(value)
        names = [sub_path(path, str(i)) for i in range(len(values))]
        ways = [(i,) if cls is list else ("v", i) for i in range(len(values))]
    else:
        return _leaf(value, path, steps, encode)
    parts = tuple(
        _part(item, _at(node, way), name, (*steps, *way), tensors, encode)
        for item, name, way in zip(values, names, ways, strict=True)
    )
    keys = list(value) if key_types else []
    return _Box(cls, keys, key_types, parts, all(part is None for part in parts), attributes)


def _leaf(value: Any, path: str, steps: Steps, encode: Encode) -> _Leaf:
    encode(value, path)  # tensors in it are known by their paths, or this state cannot be recognised
    return _Leaf(path, steps, None)


def _is_plain(value: Any) -> bool:
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return type(value) in _SCALARS


def _marshalled(value: Any) -> bytes | None:
    """None for what is not made of exact built-in types."""
    # Such as the version metadata that `Module.state_dict` hangs on its dict: marshal knows no ordered dict.
    ordered = type(value) is OrderedDict and not vars(value)
    try:
        # Version 2 has no references, which would depend on who else holds a value.
        return b"ordered" * ordered + marshal.dumps(dict(value) if ordered else value, 2)
    except ValueError:
        return None


def _at(node: Any, steps: Steps) -> Any:
    for step in steps:
        node = node[step]
    return node


def _with(tree: Any, steps: Steps, node: Any) -> Any:
    """`tree` with another node in one place; what lies beside the way there is shared."""
    if not steps:
        return node
    copy = tree.copy()
    copy[steps[0]] = _with(tree[steps[0]], steps[1:], node)
    return copy
