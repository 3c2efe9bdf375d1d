"""An index on its way to the writer's process, save after save.

What it says of thousands of tensors seldom changes. So long dicts and lists go there once and are referred to by number
afterwards, and their JSON is made there, once: to encode 8,000 tensors takes the interpreter 9 ms, and a loop of many
small operations feels every one of them. What is new goes by `marshal`, since both ends are the same interpreter.
"""

from __future__ import annotations

import marshal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from spot_core.writer.job import RawJson, WriteJob, dumps, entries_of, join_index

__all__ = ["Packer", "Unpacker"]

_LONG = 64
"""Dicts and lists with more entries go once; what is in shorter ones is looked through at each save."""

_LOOKS = 500
"""So many of them at most; what comes after goes as it is, which is quicker than to look through it."""


@dataclass(frozen=True)
class _Sent:
    value: Any
    """Held, so that nothing else can be at its address: it is known by identity."""
    number: int


class Packer:
    """The trainer's end: `pack` for the jobs of one writer, which has to get what comes of it, in order.

    A dict, list or RawJson of an index must not change once it was packed.
    """

    def __init__(self) -> None:
        self._sent: dict[int, _Sent] = {}
        self._count = 0

    def pack(self, job: WriteJob) -> bytes:
        """The job's index for `Unpacker.take`. Raises ValueError for what is not made of JSON values."""
        packing = _Packing(self._sent, self._count)
        entries = {key: packing.piece(value) for key, value in entries_of(job).items()}
        used = [sent.number for sent in packing.used.values()]
        packed = marshal.dumps((job.rank, entries, packing.fresh, used))
        self._sent, self._count = packing.used, packing.count
        return packed


class _Packing:
    def __init__(self, sent: dict[int, _Sent], count: int) -> None:
        self._sent = sent
        self.count = count
        self.used: dict[int, _Sent] = {}
        self.fresh: dict[int, Any] = {}
        self._looks = _LOOKS

    def piece(self, value: Any) -> Any:
        """`value` with numbers, as bytes, in place of what goes once."""
        cls = type(value)
        if cls is bytes:
            raise ValueError("bytes are no JSON value")
        if cls is RawJson or (cls in (dict, list) and len(value) > _LONG):
            return b"%d" % self._number(value)
        if cls not in (dict, list) or not self._looks:
            return value
        self._looks -= 1
        if cls is list:
            return [self.piece(item) for item in value]
        if all(type(key) is str for key in value):
            return {key: self.piece(item) for key, item in value.items()}
        return value

    def _number(self, value: Any) -> int:
        sent = self._sent.get(id(value)) or self.used.get(id(value))
        if sent is None:
            self.count += 1
            sent = _Sent(value, self.count)
            self.fresh[sent.number] = value.text if isinstance(value, RawJson) else value
        self.used[id(value)] = sent
        return sent.number


@dataclass(frozen=True)
class _Piece:
    value: Any
    """The text itself as bytes, or a value to be encoded."""

    @cached_property
    def text(self) -> bytes:
        return self.value if isinstance(self.value, bytes) else dumps(self.value)


class Unpacker:
    """The writer's end."""

    def __init__(self) -> None:
        self._pieces: dict[int, _Piece] = {}

    def take(self, packed: bytes) -> Callable[[], bytes]:
        """To be called with all that was packed, in order; what it returns does what `job.encode_index` does, on
        whatever thread has time for it."""
        rank, entries, fresh, used = marshal.loads(packed)
        known = self._pieces | {number: _Piece(value) for number, value in fresh.items()}
        pieces = self._pieces = {number: known[number] for number in used}

        def encode() -> bytes:
            return join_index(rank, {key: _text(value, pieces) for key, value in entries.items()})

        return encode


def _text(value: Any, pieces: dict[int, _Piece]) -> bytes:
    if isinstance(value, bytes):
        return pieces[int(value)].text
    if isinstance(value, list):
        return b"[" + b",".join([_text(item, pieces) for item in value]) + b"]"
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return b"{" + b",".join([dumps(key) + b":" + _text(item, pieces) for key, item in value.items()]) + b"}"
    return dumps(value)
