"""What the trainer hands to the writer: one rank's part of one save, and what the writer adds to its index."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

from spot_core.digest import CHUNKS_KEY, chunks_entry
from spot_core.manifest import BASES, FORMAT, ObjectRef


class Target(Protocol):
    """The keys a part is written to, both new (`PartTarget` of an open generation)."""

    @property
    def blob_key(self) -> str: ...

    @property
    def index_key(self) -> str: ...


class RawJson:
    """A value of an index that does not change between saves: encoded once, by the first thread that asks."""

    def __init__(self, make: Callable[[], Any]) -> None:
        """`make()` is the value."""
        self._make = make

    @cached_property
    def text(self) -> bytes:
        return dumps(self._make())


@dataclass(frozen=True)
class WriteJob:
    """Write `size` bytes of the slab as the blob, then `index` with the blob's chunk digests beside it.

    With `size` 0 there is no blob. `index` holds JSON values, or `RawJson` at its top level. Format and rank are put
    before it (see `spot_core.parts`); its key "chunks" is the writer's.
    """

    rank: int
    target: Target
    size: int
    index: Mapping[str, Any]
    local: bool = False
    """Write it to the local tier; to the durable store otherwise."""
    spare: tuple[str, ...] = ()
    """For the local tier: names of the generations that have to stay there (see `LocalTier.make_room`),"""
    extra: tuple[str, ...] = ()
    """and of those that may, while there is room."""
    base_room: int = 0
    """With more than 0 the part also has base blobs, of which `WriterClient.settle` tells; a new one has at most this
    many bytes."""


@dataclass(frozen=True)
class Bases:
    """The base blobs of a part: those of older generations that it refers to, and at most one that is written."""

    refs: tuple[ObjectRef, ...] = ()
    entries: tuple[bytes, ...] = ()
    """What the index says of them, each a JSON object."""
    start: int = 0
    """The new one is taken from this byte of the slab on, a multiple of the page size."""
    size: int = 0
    """Its bytes; 0 for none."""
    tensors: bytes = b"{}"
    """What the index says of the tensors in it, a JSON object."""

    def to_wire(self) -> tuple[dict[str, Any], bytes]:
        """JSON fields and raw bytes."""
        texts = [*self.entries, self.tensors]
        fields = {"refs": [ref.to_json() for ref in self.refs], "start": self.start, "size": self.size}
        return {**fields, "lengths": [len(text) for text in texts]}, b"".join(texts)

    @classmethod
    def from_wire(cls, fields: Mapping[str, Any], data: bytes) -> Bases:
        texts, at = [], 0
        for length in fields["lengths"]:
            texts.append(data[at : at + length])
            at += length
        refs = tuple(ObjectRef.from_json(ref) for ref in fields["refs"])
        return cls(refs, tuple(texts[:-1]), fields["start"], fields["size"], texts[-1])


def fields_of(job: WriteJob) -> dict[str, Any]:
    """All of a job but its index, as JSON values."""
    return {
        "rank": job.rank,
        "blob_key": job.target.blob_key,
        "index_key": job.target.index_key,
        "size": job.size,
        "local": job.local,
        "spare": list(job.spare),
        "extra": list(job.extra),
        "base_room": job.base_room,
    }


def encode_index(job: WriteJob) -> bytes:
    """The job's index as UTF-8 JSON."""
    return join_index(job.rank, {key: _text(value) for key, value in entries_of(job).items()})


def entries_of(job: WriteJob) -> Mapping[str, Any]:
    """What the caller says in the index: JSON values and `RawJson`."""
    for key in (CHUNKS_KEY, BASES, "features"):
        if key in job.index:
            raise ValueError(f"an index must not bring its own {key!r} entry: the writer adds it")
    return job.index


def join_index(rank: int, texts: Mapping[str, bytes]) -> bytes:
    """The index of these entries, each encoded already."""
    entries = {"format": dumps(FORMAT), "rank": dumps(rank), **texts}
    return b"{" + b",".join(dumps(key) + b":" + text for key, text in entries.items()) + b"}"


def finish_index(index: bytes, chunk_digests: list[bytes], bases: Sequence[bytes] = ()) -> bytes:
    """Add the chunk digests, and what is said of base blobs, to an encoded index without parsing it."""
    more = {CHUNKS_KEY: dumps(chunks_entry(chunk_digests))}
    if bases:
        more |= {"features": dumps([BASES]), BASES: b"[" + b",".join(bases) + b"]"}
    return index[:-1] + b"".join(b"," + dumps(key) + b":" + text for key, text in more.items()) + b"}"


def base_entry(chunks: bytes, tensors: bytes) -> bytes:
    """What an index says of one base blob; both are JSON objects."""
    return b'{"' + CHUNKS_KEY.encode() + b'":' + chunks + b',"tensors":' + tensors + b"}"


def chunks_text(chunk_digests: Sequence[bytes]) -> bytes:
    """`chunks_entry`, encoded."""
    return dumps(chunks_entry(chunk_digests))


def _text(value: Any) -> bytes:
    return value.text if isinstance(value, RawJson) else dumps(value)


def dumps(value: Any) -> bytes:
    """JSON as it stands in an index. Raises ValueError or TypeError for what is no JSON value."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode()
