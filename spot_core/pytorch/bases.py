"""Tensors that are not expected to change: found unchanged by their content, and referred to instead of written again.

A frozen base is planned apart from the rest, into a *base blob* (see `spot_core.parts`). At each save every tensor of
it is digested where it lies and compared with the digest that stands in the newest committed generation's index. An
equal one is neither copied nor written: the part refers to the blob that holds it. All others go into a new base blob.
What is expected only says where to look; the content decides (versions counted by torch miss fused optimizers and
writes through `.data`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch

from spot_core.digest import CHUNKS_KEY, bytes_digest
from spot_core.errors import FormatError
from spot_core.generation import Committed
from spot_core.manifest import ObjectRef
from spot_core.parts import BlobIndex
from spot_core.pytorch.index import Chunk, chunks_of, entry_of
from spot_core.pytorch.plan import RankPlan
from spot_core.writer import Bases
from spot_core.writer.job import base_entry, chunks_text
from spot_core.writer.slab import Slab

__all__ = ["Baseline", "Held", "Look", "held_in"]

LEAST_USED = 0.5
"""A blob is referred to while at least this part of it is of use: it stays as a whole, so that what is kept for
references is at most twice what they need."""

MOST_BLOBS = 8
"""A part refers to at most so many blobs; what lies in further ones is written again, together."""

_MOVE_BYTES = 16 << 20
"""Moves within the slab hold the interpreter's lock: in steps of this size."""

Key: TypeAlias = tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]
"""Which box of which tensor: fqn, dtype, the tensor's shape, the box's offsets and lengths."""


@dataclass(frozen=True, eq=False)
class _Blob:
    ref: ObjectRef
    chunks: bytes
    """Its chunk digests, as JSON text."""


@dataclass(frozen=True)
class Held:
    """Where a committed generation holds a box of a tensor, and the digest of its bytes."""

    blob: _Blob
    chunk: Chunk
    digest: str


def held_in(bases: Iterable[tuple[ObjectRef, BlobIndex]]) -> dict[Key, Held]:
    """By key, what lies in these base blobs of one generation. Raises FormatError."""
    held: dict[Key, Held] = {}
    for ref, index in bases:
        blob = _Blob(ref, json.dumps(index.raw[CHUNKS_KEY]).encode())
        for fqn, chunks in chunks_of(index, ref, ref.key).items():
            entries = index.raw["tensors"][fqn]
            for chunk, entry in zip(chunks, entries, strict=True):
                if not isinstance(entry.get("digest"), str):
                    raise FormatError(f"{ref.key} holds {fqn!r} without a digest of its own.")
                held.setdefault(_key(fqn, chunk), Held(blob, chunk, entry["digest"]))
    return held


def _key(fqn: str, chunk: Chunk) -> Key:
    return fqn, chunk.dtype, chunk.shape, chunk.offsets, chunk.lengths


@dataclass(eq=False)
class Look:
    """One save's look at the tensors of a plan's base. Belongs to the thread that stages."""

    plan: RankPlan
    known: Mapping[Key, Held]
    """What may be referred to."""
    last: tuple[Look, Bases] | None = None
    """The look before, and what came of it: the same again when nothing changed."""
    same: dict[int, Held] = field(default_factory=dict)
    """By number of the item: it is what a committed generation holds."""
    digests: dict[int, str] = field(default_factory=dict)
    """By number of the item: it is something else."""
    changed: frozenset[str] = frozenset()
    """Names of tensors that a committed generation holds with another content."""
    chunks: dict[Key, Chunk] = field(default_factory=dict)
    """Where those of the new blob lie in it."""

    def at_source(self, number: int, source: memoryview, target: torch.Tensor) -> None:
        """Item `number` lies in host memory: its digest, and its copy into the slab when it has to be written. Several
        threads may look at once."""
        if not self._is_same(number, source):
            target.copy_(self.plan.bases[number].tensor.detach())  # no thread need be told that no gradient is wanted

    def finish(self, slab: Slab) -> Bases:
        """All items are looked at or in the slab: the rest is looked at there, and what is new is moved together."""
        start = self.plan.base_start
        for number, item in enumerate(self.plan.bases):
            if number not in self.same and number not in self.digests:
                at = start + item.offset
                self._is_same(number, slab.data[at : at + item.nbytes])
        self.changed = frozenset(
            self.plan.bases[number].fqn for number in self.digests if self._key(number) in self.known
        )
        if self.last is not None and not self.digests and self._repeats(self.last[0]):
            return self.last[1]
        at, texts = 0, dict[str, list[Any]]()
        for number in sorted(self.digests):
            item = self.plan.bases[number]
            _move(slab, start + item.offset, start + at, item.nbytes)
            chunk = item.chunk_at(at)
            self.chunks[self._key(number)] = chunk
            texts.setdefault(item.fqn, []).append(entry_of(chunk, self.digests[number]))
            end, at = at + item.nbytes, item.next_offset(at)
            slab.data[start + end : start + at] = bytes(at - end)  # equal bases are equal blobs
        return self._bases(at, texts)

    def _bases(self, size: int, new: dict[str, list[Any]]) -> Bases:
        used: dict[_Blob, dict[str, list[Any]]] = {}
        for number, held in self.same.items():
            entries = used.setdefault(held.blob, {})
            entries.setdefault(self.plan.bases[number].fqn, []).append(entry_of(held.chunk, held.digest))
        return Bases(
            refs=tuple(blob.ref for blob in used),
            entries=tuple(base_entry(blob.chunks, _dumps(tensors)) for blob, tensors in used.items()),
            start=self.plan.base_start,
            size=size,
            tensors=_dumps(new),
        )

    def held_next(self, written: ObjectRef | None, digests: Sequence[bytes]) -> dict[Key, Held]:
        """What the generation of this look holds, given the new blob that came of it."""
        held = {self._key(number): found for number, found in self.same.items()}
        if written is not None:
            blob = _Blob(written, chunks_text(digests))
            for number, digest in self.digests.items():
                key = self._key(number)
                held[key] = Held(blob, self.chunks[key], digest)
        return held

    def _is_same(self, number: int, data: memoryview) -> bool:
        digest, held = bytes_digest(data), self.known.get(self._key(number))
        if held is not None and held.digest == digest:
            self.same[number] = held
            return True
        self.digests[number] = digest
        return False

    def _repeats(self, before: Look) -> bool:
        return before.plan is self.plan and before.same == self.same and not before.digests

    def _key(self, number: int) -> Key:
        return self.plan.bases[number].key


def _move(slab: Slab, source: int, target: int, nbytes: int) -> None:
    """Towards the front, where the areas may overlap."""
    if source == target:
        return
    for at in range(0, nbytes, _MOVE_BYTES):
        step = min(_MOVE_BYTES, nbytes - at)
        slab.data[target + at : target + at + step] = slab.data[source + at : source + at + step]


def _dumps(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


class Baseline:
    """What the saves of one rank may refer to, from generation to generation. Belongs to the thread that saves."""

    def __init__(self, held: Mapping[Key, Held] | None = None, *, refers: bool = True) -> None:
        """`held`: what the generation holds that this life goes on from. Without `refers` every save is whole."""
        self._held: Mapping[Key, Held] = held or {}
        self._refers = refers
        self._known: tuple[RankPlan, Mapping[Key, Held], Mapping[Key, Held]] | None = None
        self._flying: tuple[str, Look] | None = None
        self._last: tuple[Look, Bases] | None = None
        self._restless: frozenset[str] = frozenset()
        self.mutable: frozenset[str] = frozenset()
        """Names of tensors that changed in two saves in a row: they belong to the rest."""

    def begin(
        self, plan: RankPlan, index_key: str, newest: Committed | None, written: tuple[str, tuple[bytes, ...]]
    ) -> Look | None:
        """The look of the save whose index is to go to `index_key`; None for a plan without a base.

        `newest`: the newest generation that this life committed, as all ranks know it. `written`: key and chunk digests
        of the base blob that this rank wrote last.
        """
        self._take(newest, written)
        if not plan.bases:
            return None
        if self._known is None or self._known[0] is not plan or self._known[1] is not self._held:
            self._known = (plan, self._held, _worth_it(plan, self._held) if self._refers else {})
        look = Look(plan, self._known[2], self._last)
        self._flying = (index_key, look)
        return look

    def settled(self, look: Look, bases: Bases) -> None:
        """`look` is finished. May be called by the thread that stages, before the next `begin`."""
        self._last = (look, bases)
        self.mutable |= self._restless & look.changed
        self._restless = look.changed

    def _take(self, newest: Committed | None, written: tuple[str, tuple[bytes, ...]]) -> None:
        flying, self._flying = self._flying, None
        if flying is None or newest is None:
            return
        index_key, look = flying
        part = next((part for part in newest.manifest.parts if part.index.key == index_key), None)
        if part is None:
            return  # that save failed
        new = [ref for ref in part.bases if ref.key == written[0]] if look.digests else []
        if look.digests and not new:
            return  # the writer that wrote it is gone, and its chunk digests with it
        if look.digests or len(look.same) != len(self._held):
            self._held = look.held_next(new[0] if new else None, written[1])


def _worth_it(plan: RankPlan, held: Mapping[Key, Held]) -> Mapping[Key, Held]:
    """What of `held` the plan has in blobs that are used enough, and not in too many of them."""
    used: dict[_Blob, int] = {}
    found = {item.key: held[item.key] for item in plan.bases if item.key in held}
    for place in found.values():
        used[place.blob] = used.get(place.blob, 0) + place.chunk.nbytes
    enough = [blob for blob, nbytes in used.items() if nbytes >= LEAST_USED * blob.ref.size]
    kept = set(sorted(enough, key=lambda blob: -used[blob])[:MOST_BLOBS])
    return {key: place for key, place in found.items() if place.blob in kept}
