"""Blobs that outlive their generation, because newer generations refer to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from spot_core import layout
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest

__all__ = ["Lender", "Lent", "lent"]


@dataclass(frozen=True)
class Lender:
    """A generation that was pruned, and what is left of it: nothing but blobs that live ones refer to."""

    id: GenerationId
    keys: tuple[str, ...]


@dataclass(frozen=True)
class Lent:
    """What must not be deleted with its generation."""

    keys: frozenset[str]
    before: GenerationId | None = None
    """The newest generation whose marker is there and cannot be read: any older base blob may be what it refers to."""

    def holds(self, key: str) -> bool:
        if key in self.keys:
            return True
        gen = layout.generation_of(key)
        return self.before is not None and layout.is_base(key) and gen is not None and gen < self.before


def lent(manifests: Iterable[Manifest], unknown: Iterable[GenerationId] = ()) -> Lent:
    """What the generations of these `manifests` refer to, and those of `unknown` content may."""
    keys = frozenset(ref.key for manifest in manifests for ref in manifest.referred)
    return Lent(keys, max(unknown, default=None))
