"""The commit marker's content: every object of a generation with size and digest, and what made it.

Pure values with JSON in and out; no I/O. Format rules: a reader refuses a `format` above its own and any
entry of `features` that it does not know (`FormatError`); it ignores unknown fields otherwise. So an
addition that old readers may ignore is a new field; one that they must not ignore is a feature flag.
Nothing secret is ever put in: URIs, storage options and environment variables stay out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias, Union

from spot_core.errors import FormatError
from spot_core.layout import GenerationId, generation_prefix

__all__ = ["BASES", "FEATURES", "FORMAT", "JSON", "Manifest", "ObjectRef", "Part", "decode", "encode"]

FORMAT = 1
BASES = "bases"
FEATURES: frozenset[str] = frozenset({BASES})
"""`bases`: parts have base blobs, of which some lie in older generations."""

JSON: TypeAlias = Union[bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"], None]  # noqa: UP007 - a forward reference


def encode(value: Mapping[str, JSON]) -> bytes:
    """Canonical JSON: sorted keys, so that equal values are equal bytes."""
    return (json.dumps(value, sort_keys=True, indent=1) + "\n").encode()


def decode(data: bytes, what: str) -> dict[str, Any]:
    """The JSON object in `data`, after checking format and features.

    Raises:
        FormatError: no JSON object, or written by a newer release. `what` names it in the message.
    """
    try:
        value = json.loads(data)
    except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise FormatError(f"{what} is not JSON ({error}).") from error
    if not isinstance(value, dict):
        raise FormatError(f"{what} is JSON, but not an object.")
    number = value.get("format")
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise FormatError(f"{what} has no format number.")
    features = value.get("features", [])
    unknown = sorted(set(map(str, features)) - FEATURES) if isinstance(features, list) else [str(features)]
    if number > FORMAT or unknown:
        raise FormatError(
            f"{what} has format {number}, features {unknown}; this release reads format {FORMAT}.",
            hint="Upgrade lightning-spot to read it; nothing was changed.",
        )
    return value


@dataclass(frozen=True)
class ObjectRef:
    """One object of a generation."""

    key: str
    size: int
    """Bytes."""
    digest: str
    """``xxh3_128:<hex>`` (small objects, whole) or ``xxh3_128-tree:<hex>`` (blobs); see `spot_core.digest`."""

    def to_json(self) -> dict[str, JSON]:
        return {"key": self.key, "size": self.size, "digest": self.digest}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> ObjectRef:
        return cls(key=_str(value["key"]), size=_int(value["size"]), digest=_str(value["digest"]))


@dataclass(frozen=True)
class Part:
    """What one rank wrote. `blob` is None for a rank that holds no bytes of its own."""

    rank: int
    blob: ObjectRef | None
    index: ObjectRef
    bases: tuple[ObjectRef, ...] = ()
    """Blobs of what is not expected to change: this generation's own, and those of older ones that still hold what this
    rank has. In the order of the index's entries."""

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        return (*([] if self.blob is None else [self.blob]), self.index, *self.bases)

    def to_json(self) -> dict[str, JSON]:
        value: dict[str, JSON] = {
            "rank": self.rank,
            "blob": None if self.blob is None else self.blob.to_json(),
            "index": self.index.to_json(),
        }
        if self.bases:
            value["bases"] = [ref.to_json() for ref in self.bases]
        return value

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Part:
        blob = value["blob"]
        return cls(
            rank=_int(value["rank"]),
            blob=None if blob is None else ObjectRef.from_json(blob),
            index=ObjectRef.from_json(value["index"]),
            bases=tuple(ObjectRef.from_json(ref) for ref in value.get("bases", ())),
        )


@dataclass(frozen=True)
class Manifest:
    """The commit marker: a generation is real when an object with this content exists at its marker key."""

    run_id: str
    life: int
    step: int
    write_id: str
    """Tells this attempt from any other at the same name: it settles a lost reply."""
    created: float
    """Unix seconds, at the coordinator."""
    world_size: int
    parts: tuple[Part, ...]
    meta: Mapping[str, JSON] = field(default_factory=dict)
    """What made it: code revision, versions, config, data position, reason, `finished`. Never a secret."""
    format: int = FORMAT

    @property
    def id(self) -> GenerationId:
        return GenerationId(self.life, self.step)

    @property
    def finished(self) -> bool:
        """True when the training that wrote this generation had reached its end."""
        return self.meta.get("finished") is True

    @property
    def objects(self) -> tuple[ObjectRef, ...]:
        """All that this generation needs, each once; also what lies in older ones."""
        return tuple({ref.key: ref for part in self.parts for ref in part.objects}.values())

    @property
    def bases(self) -> tuple[ObjectRef, ...]:
        """What the next generation may refer to."""
        return tuple({ref.key: ref for part in self.parts for ref in part.bases}.values())

    @property
    def referred(self) -> tuple[ObjectRef, ...]:
        """What of `objects` lies in older generations, at the place where it was first written."""
        prefix = generation_prefix(self.id)
        return tuple(ref for ref in self.bases if not ref.key.startswith(prefix))

    @property
    def size(self) -> int:
        """Bytes of all objects, the marker left out: what a restore reads."""
        return sum(ref.size for ref in self.objects)

    @property
    def own_size(self) -> int:
        """Bytes of the objects that were written for this generation."""
        return self.size - sum(ref.size for ref in self.referred)

    def to_json(self) -> dict[str, JSON]:
        return {
            "format": self.format,
            "features": [BASES] if self.bases else [],
            "run_id": self.run_id,
            "life": self.life,
            "step": self.step,
            "write_id": self.write_id,
            "created": self.created,
            "world_size": self.world_size,
            "parts": [part.to_json() for part in self.parts],
            "meta": self.meta,
        }

    def to_bytes(self) -> bytes:
        return encode(self.to_json())

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Manifest:
        meta = value["meta"]
        if not isinstance(meta, dict):
            raise TypeError("meta is not an object")
        return cls(
            format=_int(value["format"]),
            run_id=_str(value["run_id"]),
            life=_int(value["life"]),
            step=_int(value["step"]),
            write_id=_str(value["write_id"]),
            created=float(value["created"]),
            world_size=_int(value["world_size"]),
            parts=tuple(Part.from_json(part) for part in value["parts"]),
            meta=meta,
        )

    @classmethod
    def from_bytes(cls, data: bytes, what: str = "manifest") -> Manifest:
        """Raises FormatError when `data` is no manifest that this release can read."""
        value = decode(data, what)
        try:
            return cls.from_json(value)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise FormatError(f"{what} lacks or garbles a field ({error!r}).") from error


def _int(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise TypeError(f"expected a count, not {value!r}")
    return value


def _str(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected a string, not {value!r}")
    return value
