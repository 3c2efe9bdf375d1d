"""Everything a generation holds, put together from the indexes of all its parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    TensorProperties,
    TensorStorageMetadata,
)

from spot_core.errors import FormatError, KeyMissingError, TornGenerationError
from spot_core.layout import GenerationId
from spot_core.manifest import ObjectRef, Part
from spot_core.parts import BlobIndex, PartIndex
from spot_core.pytorch.codec import torch_dtype
from spot_core.pytorch.index import Chunk, chunks_of, local_prefix, trees_of
from spot_core.pytorch.state import tensor_nodes
from spot_core.store import Store
from spot_core.verify import Verified

__all__ = ["Blob", "Catalogue"]


@dataclass(frozen=True)
class Blob:
    """A blob of this generation, or an older one's that it refers to, and how to check it."""

    rank: int
    """One whose part says that it holds bytes of its own."""
    ref: ObjectRef
    chunk_size: int
    digests: Sequence[bytes] = field(repr=False)


@dataclass(frozen=True)
class Catalogue:
    """Names of a generation and where their bytes are. Made by `read`, whose digests vouch for it."""

    store: Store
    generation: GenerationId
    world_size: int
    blobs: Mapping[str, Blob]
    """By key."""
    tensors: Mapping[str, Sequence[Chunk]]
    """Boxes of each tensor, which cover it; those of a rank's own carry its prefix."""
    objects: Mapping[str, tuple[str, int, int]]
    """Key of its blob, offset and length there, in bytes."""
    shared_tree: Any
    local_trees: Mapping[int, Any]
    bases: Sequence[tuple[ObjectRef, BlobIndex]]
    aliases: Mapping[str, str]
    """Further names of shared tensors (tied weights), to the names they are stored under."""
    progress: Callable[[], None] = field(default=lambda: None, repr=False, compare=False)
    """To be called whenever something more is read."""

    @classmethod
    def read(
        cls, store: Store, verified: Verified, *, threads: int = 4, progress: Callable[[], None] = lambda: None
    ) -> Catalogue:
        """Read every part's index.

        Raises CorruptShardError, TornGenerationError or FormatError for damage, StoreError.
        """
        manifest, gen = verified.committed.manifest, verified.committed.id
        where = f"generation {gen} at {store.uri}"
        with ThreadPoolExecutor(threads, thread_name_prefix="spot-index") as pool:
            indexes = list(pool.map(lambda part: _index(store, part, where, progress), manifest.parts))
        blobs: dict[str, Blob] = {}
        tensors: dict[str, list[Chunk]] = {}
        objects: dict[str, tuple[str, int, int]] = {}
        shared: Any = None
        local: dict[int, Any] = {}
        for part, index in zip(manifest.parts, indexes, strict=True):
            told = f"The index of rank {part.rank}, {where},"
            for ref, blob in [(part.blob, index), *zip(part.bases, index.bases, strict=True)]:
                for fqn, chunks in chunks_of(blob, ref, told).items():
                    tensors.setdefault(fqn, []).extend(chunks)
                key = "" if ref is None else ref.key
                objects.update({name: (key, at, size) for name, (at, size) in blob.objects.items()})
                if ref is not None:
                    blobs.setdefault(key, Blob(part.rank, ref, blob.chunk_size, blob.digests))
            tree, local[part.rank] = trees_of(index)
            shared = tree if part.rank == 0 else shared
        _check_cover(tensors, where)
        aliases = {node["as"]: node["fqn"] for node in tensor_nodes(shared) if "as" in node}
        pairs = zip(manifest.parts, indexes, strict=True)
        bases = [pair for part, index in pairs for pair in zip(part.bases, index.bases, strict=True)]
        return cls(store, gen, manifest.world_size, blobs, tensors, objects, shared, local, bases, aliases, progress)

    @property
    def where(self) -> str:
        return f"generation {self.generation} at {self.store.uri}"

    def chunks(self, fqn: str) -> Sequence[Chunk]:
        """The boxes of a tensor, by any of its names. Raises KeyError."""
        return self.tensors[self.aliases.get(fqn, fqn)]

    def shared_names(self) -> list[str]:
        """Tensors of the shared state, without their further names."""
        prefixes = tuple(local_prefix(rank) for rank in self.local_trees)
        return [fqn for fqn in self.tensors if not fqn.startswith(prefixes)]

    def local_names(self, rank: int) -> list[str]:
        """Tensors of one rank's own state, with its prefix."""
        return [fqn for fqn in self.tensors if fqn.startswith(local_prefix(rank))]

    def metadata(self) -> dict[str, TensorStorageMetadata]:
        """All tensors, further names included, as `torch.distributed.checkpoint` describes them."""
        return {fqn: _metadata(self.chunks(fqn)) for fqn in (*self.tensors, *self.aliases)}


def _index(store: Store, part: Part, where: str, progress: Callable[[], None]) -> PartIndex:
    try:
        index = PartIndex.read(store, part)
    except KeyMissingError as error:
        raise TornGenerationError(f"The {where} is torn: {part.index.key} of rank {part.rank} is missing.") from error
    progress()
    return index


def _check_cover(tensors: Mapping[str, Sequence[Chunk]], where: str) -> None:
    """Boxes that leave a gap would leave arbitrary memory in the state."""
    for fqn, chunks in tensors.items():
        first = chunks[0]
        if any((chunk.shape, chunk.dtype) != (first.shape, first.dtype) for chunk in chunks):
            raise FormatError(f"The ranks of {where} do not agree on the shape and dtype of {fqn!r}.")
        if sum(math.prod(chunk.lengths) for chunk in chunks) != math.prod(first.shape):
            raise FormatError(f"The parts of {where} do not cover {fqn!r}.")


def _metadata(chunks: Sequence[Chunk]) -> TensorStorageMetadata:
    boxes = [ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.lengths)) for chunk in chunks]
    return TensorStorageMetadata(TensorProperties(torch_dtype(chunks[0].dtype)), torch.Size(chunks[0].shape), boxes)
