"""Split a nested training state into JSON, tensors and opaque objects, and join it back, value for value.

`split` walks dicts, lists and the other containers of Python and leaves a *tree*: JSON in which each tensor is a
reference by its fully qualified name (fqn, the dotted path to it). What neither JSON nor a tensor can hold becomes an
opaque object: the bytes of `torch.save`, which must load back with `weights_only=True`, so that resuming never runs
code from a file. That is tried when the state is split, because a checkpoint that cannot be loaded must not be written.

Tensors are references, not copies: snapshot them before anything changes them. Tensors with the same storage, offset,
shape and strides (tied weights) are stored once and are one tensor again after `join`. Views that overlap without being
equal are stored separately and no longer overlap after `join`.
"""

from __future__ import annotations

import base64
import io
import re
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from spot_core.errors import ConfigError, FormatError
from spot_core.pytorch import codec, nested
from spot_core.pytorch._private import namedtuple_fields, sharded_tensor_class, storage_identity
from spot_core.pytorch.codec import KIND

__all__ = ["Split", "join", "split", "tensor_nodes"]

INLINE_BYTES = 4096
"""Byte strings up to this size stand in the tree, so that most states have no objects beside it."""

_ONLY_TEXT = frozenset({str})
_RANK_PREFIX = re.compile(r"rank\d{5,}\.")
_FACTORIES: dict[str, type] = {
    cls.__name__: cls
    for cls in (int, float, complex, bool, str, bytes, list, dict, set, tuple, deque, Counter, OrderedDict)
}
PLAIN_TENSORS = {torch.Tensor, torch.nn.Parameter, torch.nn.Buffer}


class Split(NamedTuple):
    """The three parts of a state: JSON, tensors by fqn (live, detached), bytes of opaque objects by fqn."""

    tree: Any
    tensors: dict[str, torch.Tensor]
    objects: dict[str, bytes]


def split(value: Any, *, droppable: Collection[str] = (), allow_pickle: bool = False) -> Split:
    """Take `value` apart; see the module text.

    droppable: dotted paths under which a value that cannot be saved is left out (its type's name stays in the tree)
        instead of refused, e.g. ``("hyper_parameters",)``; ``""`` stands for everywhere.
    allow_pickle: save such values as pickles, which `join` will load only with `allow_pickle=True`.

    Raises ConfigError, before anything is written, for a value that could not be loaded back, for a state that contains
    itself, and for a tensor whose storage does not hold its values (meta tensors).
    """
    return Splitter(droppable, allow_pickle).split(value)


class Splitter:
    """One use of `split`; `Resplitter` is the other kind."""

    def __init__(self, droppable: Collection[str], allow_pickle: bool) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.objects: dict[str, bytes] = {}
        self._droppable = tuple(droppable)
        self._allow_pickle = allow_pickle
        self._seen: dict[int, list[tuple[torch.Tensor, str]]] = {}  # by address: tensors and the fqns they have

    def split(self, value: Any) -> Split:
        try:
            tree = self.encode(value, "")
        except RecursionError as error:
            raise ConfigError("the state contains itself or nests deeper than Python's recursion limit") from error
        return Split(tree, self.tensors, self.objects)

    def encode(self, value: Any, path: str) -> Any:
        cls = type(value)
        if cls in PLAIN_TENSORS:
            return self.tensor(value, path)
        container = _CONTAINERS.get(cls)
        if container is not None:
            return container(self, value, path)
        if cls in (bytes, bytearray) and len(value) > INLINE_BYTES:
            name = self._unique(path)
            self.objects[name] = bytes(value)
            return {KIND: cls.__name__, "fqn": name}
        try:
            return codec.encode_plain(value)
        except codec.NotPlain:
            pass
        if isinstance(value, DTensor):
            return self.tensor(value, path)
        if _SHARDED is not None and isinstance(value, _SHARDED):
            # It answers few questions (no strides, no address), and FSDP ties none.
            return {KIND: "tensor", "fqn": self.store(value, path)}
        fields = namedtuple_fields(cls)
        if fields is not None:
            items = [self.encode(item, sub_path(path, name)) for name, item in zip(fields, value, strict=True)]
            return codec.namedtuple_node(value, fields, items)
        return self._object(value, path)

    def pairs(self, value: Mapping[Any, Any], path: str) -> list[list[Any]]:
        root = f"{path}." if path else ""
        return [
            [key, self.encode(item, root + key)]
            if type(key) is str
            else [self.encode(key, f"{root}{i}(key)"), self.encode(item, root + key_name(key, i))]
            for i, (key, item) in enumerate(value.items())
        ]

    def dict(self, value: dict[Any, Any], path: str) -> Any:
        # A JSON object has no order of its own (manifests are written with sorted keys), a dict has.
        if KIND not in value and _ONLY_TEXT.issuperset(map(type, value)) and list(value) == sorted(value):
            root = f"{path}." if path else ""
            return {key: self.encode(item, root + key) for key, item in value.items()}
        return {KIND: "dict", "items": self.pairs(value, path)}

    def ordered_dict(self, value: OrderedDict[Any, Any], path: str) -> Any:
        node = {KIND: "ordered_dict", "items": self.pairs(value, path)}
        if vars(value):  # `Module.state_dict()` hangs its version metadata on the dict itself
            node["attributes"] = self.dict(vars(value), sub_path(path, "(attributes)"))
        return node

    def default_dict(self, value: defaultdict[Any, Any], path: str) -> Any:
        factory = value.default_factory
        name = None if factory is None else getattr(factory, "__name__", "")
        if name is not None and _FACTORIES.get(name) is not factory:
            return self._object(value, path)
        return {KIND: "default_dict", "factory": name, "items": self.pairs(value, path)}

    def counter(self, value: Counter[Any], path: str) -> Any:
        return {KIND: "counter", "items": self.pairs(value, path)}

    def items(self, value: Collection[Any], path: str) -> list[Any]:
        return [self.encode(item, sub_path(path, str(i))) for i, item in enumerate(value)]

    def array(self, value: np.ndarray[Any, Any], path: str) -> Any:
        if value.dtype.hasobject or value.dtype.names is not None:
            return self._object(value, path)
        order: Literal["C", "F"] = "F" if value.flags.f_contiguous and not value.flags.c_contiguous else "C"
        flat = value.reshape((-1,), order=order)
        # torch has no big-endian, text or time dtypes: those travel as bytes. A read-only array cannot be viewed.
        raw = np.require(flat, requirements=["C", "W"]).view(np.uint8)
        name = self.store(torch.from_numpy(raw), path)
        return {KIND: "array", "fqn": name, "dtype": value.dtype.str, "shape": list(value.shape), "order": order}

    def tensor(self, value: torch.Tensor, path: str) -> Any:
        # Runs for every tensor in every save, on the training's thread: each question here is a cheap one.
        plain = type(value) in PLAIN_TENSORS
        if plain and (value.layout is not torch.strided or value.is_quantized or value.is_nested):
            return self._object(value, path)
        if value.is_meta:
            raise ConfigError(f"the tensor at {path!r} is on the meta device: it has no values to save")
        node: dict[str, Any] = {KIND: "tensor"}
        there = self._seen.setdefault(_address(value), [])
        for other, name in there:
            if _identity(other) == _identity(value):
                node.update({"fqn": name, "as": self._unique(path)})
                break
        else:
            node["fqn"] = name = self.store(_values_of(value), path)
            there.append((value, name))
        if type(value) is not torch.Tensor and isinstance(value, torch.nn.Parameter):
            node["parameter"] = True
        if value.requires_grad:
            node["requires_grad"] = True
        if plain and not value.is_contiguous() and _is_dense(value):
            # Kernels are chosen by strides (channels-last), and their results differ in the last bit.
            node["stride"] = list(value.stride())
        return node

    def store(self, tensor: torch.Tensor, path: str) -> str:
        name = self._unique(path)
        self.tensors[name] = tensor
        return name

    def _unique(self, path: str) -> str:
        # "a.b" and a nested inside b spell the same path; names of one rank's tensors are not to be imitated.
        name = f"~{path}" if _RANK_PREFIX.match(path) else path
        count = 1
        while name in self.tensors or name in self.objects:
            count += 1
            name = f"{path}~{count}"
        return name

    def _object(self, value: Any, path: str) -> Any:
        cls = type(value)
        type_name = f"{cls.__module__}.{cls.__qualname__}"
        data = io.BytesIO()
        try:
            torch.save(value, data)
        except Exception as error:  # noqa: BLE001 - pickling runs the object's own code, which may raise anything
            return self._refuse(path, type_name, "it cannot be pickled", error)
        node: dict[str, Any] = {KIND: "object", "path": path, "type": type_name}
        try:
            torch.load(io.BytesIO(data.getvalue()), map_location="cpu", weights_only=True)
        except Exception as error:  # noqa: BLE001 - likewise
            if not self._allow_pickle:
                return self._refuse(path, type_name, "torch.load(weights_only=True) refuses it", error)
            node["pickle"] = True
        if len(data.getvalue()) <= INLINE_BYTES:
            node["data"] = base64.b64encode(data.getvalue()).decode("ascii")
        else:
            node["fqn"] = self._unique(path)
            self.objects[node["fqn"]] = data.getvalue()
        return node

    def _refuse(self, path: str, type_name: str, why: str, error: Exception) -> Any:
        if any(root in ("", path) or path.startswith(f"{root}.") for root in self._droppable):
            return {KIND: "dropped", "type": type_name}
        raise ConfigError(
            f"the state holds a {type_name} at {path!r} which could not be loaded back safely: {why}. "
            "Nothing was written; earlier generations are whole.",
            hint=f"Return plain data from state_dict (numbers, text, lists, dicts, tensors, arrays); or trust the type "
            f"with torch.serialization.add_safe_globals([{type_name}]); or set allow_pickle=True, which runs code from "
            "the checkpoint when it is loaded.",
        ) from error


_SHARDED = sharded_tensor_class()
_CONTAINERS: dict[type, Callable[[Splitter, Any, str], Any]] = {
    dict: Splitter.dict,
    list: Splitter.items,
    tuple: lambda s, value, path: {KIND: "tuple", "v": s.items(value, path)},
    set: lambda s, value, path: {KIND: "set", "v": s.items(value, path)},
    frozenset: lambda s, value, path: {KIND: "frozenset", "v": s.items(value, path)},
    deque: lambda s, value, path: {KIND: "deque", "v": s.items(value, path), "maxlen": value.maxlen},
    slice: lambda s, value, path: {KIND: "slice", "v": s.items((value.start, value.stop, value.step), path)},
    OrderedDict: Splitter.ordered_dict,
    defaultdict: Splitter.default_dict,
    Counter: Splitter.counter,
    np.ndarray: Splitter.array,
}


def sub_path(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def key_name(key: Any, position: int) -> str:
    return str(key) if type(key) in (str, int, bool, float, type(None)) else f"{position}"


def _address(value: torch.Tensor) -> int:
    local = value if type(value) is torch.Tensor else nested.local(value)
    return local.data_ptr() or storage_identity(local)


def _identity(value: torch.Tensor) -> tuple[Any, ...]:
    """Equal for two tensors that are one and the same piece of memory, read the same way."""
    where = (value.placements, id(value.device_mesh)) if isinstance(value, DTensor) else ()
    local = nested.local(value)
    view = (local.storage_offset(), local.shape, local.stride(), local.dtype, local.is_conj(), local.is_neg())
    return (storage_identity(local), *view, value.shape, *where)


def _values_of(value: torch.Tensor) -> torch.Tensor:
    tensor = value.detach() if value.requires_grad or type(value) is not torch.Tensor else value
    lazy = type(tensor) is torch.Tensor and (tensor.is_conj() or tensor.is_neg())
    return tensor.resolve_conj().resolve_neg() if lazy else tensor


def _is_dense(value: torch.Tensor) -> bool:
    """True when the strides are a permutation of a contiguous layout, so that they can be made again."""
    return torch.empty_like(value, device="meta", memory_format=torch.preserve_format).stride() == value.stride()


def join(
    tree: Any,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, bytes],
    *,
    allow_pickle: bool = False,
) -> Any:
    """Put a state together again; the inverse of `split`.

    `tensors` are used as they are, not copied. A dropped value is left out of its dict and None elsewhere.
    `objects` must be bytes whose digests were verified.

    Raises FormatError when the tree names a tensor or object that is not there or a kind that this version does not
    know, ConfigError for a pickled object without `allow_pickle`.
    """
    return _Joiner(tensors, objects, allow_pickle).decode(tree)


class _Joiner:
    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Mapping[str, bytes], allow_pickle: bool) -> None:
        self._tensors = tensors
        self._objects = objects
        self._allow_pickle = allow_pickle
        self._made: dict[tuple[Any, ...], torch.Tensor] = {}

    def decode(self, node: Any) -> Any:
        cls = type(node)
        if cls is list:
            return [self.decode(item) for item in node]
        if cls is not dict:
            return node
        kind = node.get(KIND)
        if kind is None:
            return {key: self.decode(item) for key, item in node.items() if not _is_dropped(item)}
        decode = _PARTS.get(kind)
        if decode is not None:
            return decode(self, node)
        if kind in ("bytes", "bytearray") and "fqn" in node:
            data = self.bytes_of(node)
            return data if kind == "bytes" else bytearray(data)
        return codec.decode_plain(node)

    def pairs(self, node: Any) -> dict[Any, Any]:
        return {self.decode(key): self.decode(item) for key, item in node["items"] if not _is_dropped(item)}

    def items(self, node: Any) -> list[Any]:
        return [self.decode(item) for item in node["v"]]

    def ordered_dict(self, node: Any) -> Any:
        value = OrderedDict(self.pairs(node))
        vars(value).update(self.decode(node.get("attributes", {})))
        return value

    def default_dict(self, node: Any) -> Any:
        return defaultdict(None if node["factory"] is None else _FACTORIES[node["factory"]], self.pairs(node))

    def tensor_of(self, node: Any) -> torch.Tensor:
        try:
            return self._tensors[node["fqn"]]
        except KeyError:
            raise _missing("tensor", node) from None

    def bytes_of(self, node: Any) -> bytes:
        if "data" in node:
            return base64.b64decode(node["data"])
        try:
            return self._objects[node["fqn"]]
        except KeyError:
            raise _missing("object", node) from None

    def tensor(self, node: Any) -> Any:
        parameter, grad = node.get("parameter", False), node.get("requires_grad", False)
        stride = tuple(node.get("stride", ()))
        made = self._made.get((node["fqn"], parameter, grad, stride))
        if made is None:
            made = self.tensor_of(node)
            if stride and made.stride() != stride and not isinstance(made, DTensor):
                made = torch.empty_strided(made.shape, stride, dtype=made.dtype, device=made.device).copy_(made)
            if parameter and not isinstance(made, torch.nn.Parameter):
                made = torch.nn.Parameter(made, requires_grad=grad)
            elif grad and not made.requires_grad:
                made = made.detach().requires_grad_()
            self._made[node["fqn"], parameter, grad, stride] = made
        return made

    def array(self, node: Any) -> Any:
        raw = self.tensor_of(node).cpu().numpy()
        return raw.view(np.dtype(node["dtype"])).reshape(node["shape"], order=node["order"])

    def object(self, node: Any) -> Any:
        pickled = node.get("pickle", False)
        if pickled and not self._allow_pickle:
            raise ConfigError(
                f"the state holds a pickled {node['type']} at {node['path']!r}; loading it would run code from a file",
                hint="Set allow_pickle=True if you trust everybody who can write to the run.",
            )
        # The bytes' digest was verified; without allow_pickle nothing but weights_only's own types can come out.
        return torch.load(io.BytesIO(self.bytes_of(node)), map_location="cpu", weights_only=not pickled)


_PARTS: dict[str, Callable[[_Joiner, Any], Any]] = {
    "tensor": _Joiner.tensor,
    "array": _Joiner.array,
    "object": _Joiner.object,
    "dict": _Joiner.pairs,
    "ordered_dict": _Joiner.ordered_dict,
    "default_dict": _Joiner.default_dict,
    "counter": lambda j, node: Counter(j.pairs(node)),
    "tuple": lambda j, node: tuple(j.items(node)),
    "set": lambda j, node: set(j.items(node)),
    "frozenset": lambda j, node: frozenset(j.items(node)),
    "deque": lambda j, node: deque(j.items(node), node["maxlen"]),
    "slice": lambda j, node: slice(*j.items(node)),
    "namedtuple": lambda j, node: codec.namedtuple_value(node, j.items(node)),
    "dropped": lambda j, node: None,
}


def _missing(what: str, node: Any) -> FormatError:
    return FormatError(f"the state names {node['fqn']!r}, but no part of the generation holds that {what}")


def _is_dropped(node: Any) -> bool:
    return type(node) is dict and node.get(KIND) == "dropped"


def tensor_nodes(tree: Any) -> Iterator[dict[str, Any]]:
    """Every node of `tree` that refers to a tensor (kinds ``"tensor"`` and ``"array"``), in order."""
    stack = [tree]
    while stack:
        node = stack.pop()
        if type(node) is dict and node.get(KIND) in ("tensor", "array"):
            yield node
        elif type(node) in (dict, list):
            stack.extend(reversed(list(node.values() if type(node) is dict else node)))
