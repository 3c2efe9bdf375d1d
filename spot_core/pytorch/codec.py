"""Plain Python values as JSON, exactly: what `json` itself would lose (tuples, nan, bytes, dtypes, paths, ...).

A value that JSON has no form for becomes an object with the reserved key ``"$"``, which names its kind::

    {"$": "float", "bits": "7ff8000000000000"}      {"$": "path", "class": "PosixPath", "v": "/data"}

Nothing here imports or calls anything that a file names: enum members and named tuples are looked up among the
modules that are loaded already, and only if they are what their kind says.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import enum
import fractions
import pathlib
import struct
import sys
import uuid
import zoneinfo
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from spot_core.errors import FormatError
from spot_core.pytorch._private import namedtuple_fields

KIND = "$"
"""Reserved key: an object that has it is a typed value, not a dict."""


class NotPlain(Exception):
    """The value has no exact JSON form here."""


def _float(value: float) -> Any:
    # JSON has no nan or infinity; the bits also keep a nan's payload.
    if value - value == 0.0:
        return value
    return {KIND: "float", "bits": struct.pack(">d", value).hex()}


def _unfloat(node: Any) -> float:
    if isinstance(node, dict):
        return float(struct.unpack(">d", bytes.fromhex(node["bits"]))[0])
    return float(node)


def _int(value: int) -> Any:
    # Python refuses to print integers above 4300 digits, and other readers stop at 64 bits.
    if -(1 << 63) <= value < 1 << 63:
        return value
    return {KIND: "int", "hex": hex(value)}


def _datetime(value: datetime.datetime) -> Any:
    node = {KIND: "datetime", "v": value.replace(tzinfo=None).isoformat(), "fold": value.fold}
    return _with_zone(node, value.tzinfo)


def _time(value: datetime.time) -> Any:
    return _with_zone({KIND: "time", "v": value.replace(tzinfo=None).isoformat(), "fold": value.fold}, value.tzinfo)


def _with_zone(node: dict[str, Any], zone: datetime.tzinfo | None) -> dict[str, Any]:
    if isinstance(zone, zoneinfo.ZoneInfo) and zone.key:
        node["zone"] = zone.key
    elif type(zone) is datetime.timezone:
        node["offset"] = _timedelta(zone.utcoffset(None))["v"]
    elif zone is not None:
        raise NotPlain
    return node


def _zone(node: dict[str, Any]) -> datetime.tzinfo | None:
    if "zone" in node:
        return zoneinfo.ZoneInfo(node["zone"])
    return datetime.timezone(datetime.timedelta(*node["offset"])) if "offset" in node else None


def _timedelta(value: datetime.timedelta) -> dict[str, Any]:
    return {KIND: "timedelta", "v": [value.days, value.seconds, value.microseconds]}


def _path(value: pathlib.PurePath) -> Any:
    return {KIND: "path", "class": type(value).__name__, "v": str(value)}


def _unpath(node: dict[str, Any]) -> pathlib.PurePath:
    windows = node["class"].endswith("WindowsPath")
    pure = node["class"].startswith("Pure")
    # A concrete path of the other system cannot be made here; its pure form can, and says the same.
    foreign = windows != (pathlib.Path is pathlib.WindowsPath or sys.platform == "win32")
    if pure or foreign:
        return pathlib.PureWindowsPath(node["v"]) if windows else pathlib.PurePosixPath(node["v"])
    return pathlib.Path(node["v"])


def torch_name(value: torch.dtype | torch.layout | torch.memory_format) -> str:
    """`torch.float32` -> ``"float32"``."""
    return str(value).removeprefix("torch.")


def torch_dtype(name: str) -> torch.dtype:
    """``"float32"`` -> `torch.float32`. Raises FormatError for a name that this torch has no dtype for."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"this torch ({torch.__version__}) has no dtype {name!r}")
    return dtype


def _untorch(node: dict[str, Any]) -> Any:
    value = getattr(torch, node["v"], None)
    if not isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        raise FormatError(f"this torch ({torch.__version__}) has no {node['$']} {node['v']!r}")
    return value


def _numpy_scalar(value: np.generic) -> Any:
    if value.dtype.hasobject or value.dtype.names is not None:
        raise NotPlain
    return {KIND: "numpy", "dtype": value.dtype.str, "v": base64.b64encode(value.tobytes()).decode("ascii")}


def _un_numpy_scalar(node: dict[str, Any]) -> np.generic:
    dtype, data = np.dtype(node["dtype"]), base64.b64decode(node["v"])
    # Numpy reads no values of a dtype without width (empty text).
    value: np.generic = np.frombuffer(data, dtype)[0] if dtype.itemsize else dtype.type()
    return value


def _enum(value: enum.Enum) -> Any:
    # Combined flags have no name of their own, and a class made inside a function cannot be found again.
    cls = type(value)
    if _loaded(cls.__module__, cls.__qualname__) is not cls or value.name not in cls.__members__:
        raise NotPlain
    return {KIND: "enum", "class": f"{cls.__module__}:{cls.__qualname__}", "v": value.name}


def _unenum(node: dict[str, Any]) -> enum.Enum:
    cls = _loaded(*node["class"].split(":"))
    if not (isinstance(cls, type) and issubclass(cls, enum.Enum) and node["v"] in cls.__members__):
        raise FormatError(
            f"the state holds {node['class']}.{node['v']}, which is no enum member of a loaded module; "
            "import the module that defines it before resuming"
        )
    return cls.__members__[node["v"]]


def _loaded(module: str, qualname: str) -> object:
    found: object = sys.modules.get(module)
    for name in qualname.split("."):
        found = getattr(found, name, None)
    return found


def namedtuple_node(value: tuple[Any, ...], fields: tuple[str, ...], items: list[Any]) -> dict[str, Any]:
    """Node of a named tuple whose encoded fields are `items`."""
    cls = type(value)
    return {KIND: "namedtuple", "class": f"{cls.__module__}:{cls.__qualname__}", "fields": list(fields), "v": items}


def namedtuple_value(node: dict[str, Any], items: list[Any]) -> tuple[Any, ...]:
    """The named tuple, of its own class when that is loaded and unchanged, else of an equal one made here."""
    module, qualname = node["class"].split(":")
    fields = tuple(node["fields"])
    cls: Any = _loaded(module, qualname)
    if not isinstance(cls, type) or namedtuple_fields(cls) != fields:
        cls = _make_namedtuple(qualname.rsplit(".", 1)[-1], fields)
    made: tuple[Any, ...] = tuple.__new__(cls, items)
    return made


_make_namedtuple: Any = namedtuple  # type checkers know only literal names


def _text(kind: str) -> Callable[[Any], Any]:
    return lambda value: {KIND: kind, "v": str(value)}


_ENCODE: dict[type, Callable[[Any], Any]] = {
    type(None): lambda value: value,
    bool: lambda value: value,
    str: lambda value: value,
    int: _int,
    float: _float,
    complex: lambda value: {KIND: "complex", "v": [_float(value.real), _float(value.imag)]},
    bytes: lambda value: {KIND: "bytes", "v": base64.b64encode(value).decode("ascii")},
    bytearray: lambda value: {KIND: "bytearray", "v": base64.b64encode(value).decode("ascii")},
    range: lambda value: {KIND: "range", "v": [_int(value.start), _int(value.stop), _int(value.step)]},
    torch.Size: lambda value: {KIND: "size", "v": list(value)},
    torch.dtype: lambda value: {KIND: "dtype", "v": torch_name(value)},
    torch.layout: lambda value: {KIND: "layout", "v": torch_name(value)},
    torch.memory_format: lambda value: {KIND: "memory_format", "v": torch_name(value)},
    torch.device: _text("device"),
    datetime.datetime: _datetime,
    datetime.date: lambda value: {KIND: "date", "v": value.isoformat()},
    datetime.time: _time,
    datetime.timedelta: _timedelta,
    datetime.timezone: lambda value: {KIND: "timezone", "offset": _timedelta(value.utcoffset(None))["v"]},
    uuid.UUID: _text("uuid"),
    decimal.Decimal: _text("decimal"),
    fractions.Fraction: _text("fraction"),
    **dict.fromkeys(
        (
            pathlib.PurePosixPath,
            pathlib.PureWindowsPath,
            pathlib.PosixPath,
            pathlib.WindowsPath,
        ),
        _path,
    ),
}

_DECODE: dict[str, Callable[[Any], Any]] = {
    "float": _unfloat,
    "int": lambda node: int(node["hex"], 16),
    "complex": lambda node: complex(*map(_unfloat, node["v"])),
    "bytes": lambda node: base64.b64decode(node["v"]),
    "bytearray": lambda node: bytearray(base64.b64decode(node["v"])),
    "range": lambda node: range(*map(decode_plain, node["v"])),
    "size": lambda node: torch.Size(node["v"]),
    "dtype": _untorch,
    "layout": _untorch,
    "memory_format": _untorch,
    "device": lambda node: torch.device(node["v"]),
    "datetime": lambda node: datetime.datetime.fromisoformat(node["v"]).replace(tzinfo=_zone(node), fold=node["fold"]),
    "date": lambda node: datetime.date.fromisoformat(node["v"]),
    "time": lambda node: datetime.time.fromisoformat(node["v"]).replace(tzinfo=_zone(node), fold=node["fold"]),
    "timedelta": lambda node: datetime.timedelta(*node["v"]),
    "timezone": _zone,
    "uuid": lambda node: uuid.UUID(node["v"]),
    "decimal": lambda node: decimal.Decimal(node["v"]),
    "fraction": lambda node: fractions.Fraction(node["v"]),
    "path": _unpath,
    "numpy": _un_numpy_scalar,
    "enum": _unenum,
}


def encode_plain(value: Any) -> Any:
    """JSON for a value without parts. Raises NotPlain when it has no exact form here (then it is an opaque object)."""
    encode = _ENCODE.get(type(value))
    if encode is not None:
        return encode(value)
    if isinstance(value, np.generic):
        return _numpy_scalar(value)
    if isinstance(value, enum.Enum):
        return _enum(value)
    raise NotPlain


def decode_plain(node: Any) -> Any:
    """Inverse of `encode_plain`. Raises FormatError for a kind or a name that this version does not know."""
    if not isinstance(node, dict):
        return node
    decode = _DECODE.get(node[KIND])
    if decode is None:
        raise FormatError(f"unknown kind of value {node[KIND]!r} in the state; it was written by a newer version")
    return decode(node)
