"""What a rank's part says of its tensors and of the state's structure: the torch side of `spot_core.parts`.

Beside what `PartIndex` owns, the index of a part holds (and each entry of ``"bases"`` the ``"tensors"`` of its blob,
with the ``"digest"`` of each box beside)::

    "rank": 0, "world_size": 2,
    "tensors": {fqn: [{"offset", "nbytes", "dtype", "shape", "chunk": [[offsets], [lengths]]}, ...]},
    "tree":    {"shared": ..., "local": ...}

`offset` and `nbytes` count bytes of the blob, which holds the elements row-major; `shape` is the whole tensor's,
`chunk` the box of it that is here, in elements. A tensor of the shared state may be spread over the parts; one of a
rank's own state carries the prefix ``rank00003.``. The shared tree is rank 0's. Large opaque objects stand in
``"objects"``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spot_core.errors import FormatError
from spot_core.manifest import FORMAT, ObjectRef
from spot_core.parts import BlobIndex, PartIndex
from spot_core.pytorch.codec import torch_dtype
from spot_core.writer.job import RawJson

__all__ = ["Chunk", "chunks_json", "chunks_of", "entry_of", "index_document", "local_prefix", "trees_of"]


@dataclass(frozen=True)
class Chunk:
    """A box of a tensor, and where its bytes are in a blob."""

    offset: int
    """In bytes from the blob's start, a multiple of 64."""
    nbytes: int
    dtype: str
    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    """Where the box begins in the tensor, in elements."""
    lengths: tuple[int, ...]
    """The box's own shape."""
    key: str = ""
    """Of the blob; empty while it is not written."""

    @property
    def whole(self) -> bool:
        return self.lengths == self.shape


def local_prefix(rank: int) -> str:
    """What the names of a rank's own tensors and objects begin with."""
    return f"rank{rank:05d}."


def chunks_json(chunks: Sequence[tuple[str, Chunk]]) -> RawJson:
    """The index's ``"tensors"`` entry, not encoded yet: the first save would block for it."""
    return RawJson(lambda: _entries(chunks))


def entry_of(chunk: Chunk, digest: str | None = None) -> dict[str, Any]:
    """What the index says of one box; `digest`, of its bytes, for one in a base blob."""
    entry: dict[str, Any] = {
        "offset": chunk.offset,
        "nbytes": chunk.nbytes,
        "dtype": chunk.dtype,
        "shape": chunk.shape,
        "chunk": [chunk.offsets, chunk.lengths],
    }
    return entry if digest is None else {**entry, "digest": digest}


def _entries(chunks: Iterable[tuple[str, Chunk]]) -> dict[str, list[dict[str, Any]]]:
    tensors: dict[str, list[dict[str, Any]]] = {}
    for fqn, chunk in chunks:
        tensors.setdefault(fqn, []).append(entry_of(chunk))
    return tensors


def index_document(
    rank: int,
    world_size: int,
    *,
    tensors: RawJson,
    objects: Mapping[str, tuple[int, int]],
    shared_tree: Any,
    local_tree: Any,
) -> dict[str, Any]:
    """The index of one part, as `WriteJob.index` takes it. `shared_tree` counts on rank 0 only."""
    tree = {"local": local_tree} if rank else {"shared": shared_tree, "local": local_tree}
    return {
        "format": FORMAT,
        "rank": rank,
        "world_size": world_size,
        "objects": {name: list(place) for name, place in objects.items()},
        "tree": tree,
        "tensors": tensors,
    }


def chunks_of(index: BlobIndex, blob: ObjectRef | None, where: str) -> dict[str, list[Chunk]]:
    """The tensors in a blob. Raises FormatError for entries that do not add up or reach beyond it.

    `where` says in messages which index this is.
    """
    found: dict[str, list[Chunk]] = {}
    key, size = ("", 0) if blob is None else (blob.key, blob.size)
    try:
        for fqn, entries in index.raw.get("tensors", {}).items():
            found[fqn] = [_chunk(key, entry) for entry in entries]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FormatError(f"{where} lacks or garbles a field ({error!r}).") from error
    for fqn, chunks in found.items():
        for chunk in chunks:
            if not _adds_up(chunk, size):
                raise FormatError(f"{where} has an impossible entry for {fqn!r}.")
    return found


def _chunk(key: str, entry: Mapping[str, Any]) -> Chunk:
    offsets, lengths = entry["chunk"]
    return Chunk(
        key=key,
        offset=int(entry["offset"]),
        nbytes=int(entry["nbytes"]),
        dtype=str(entry["dtype"]),
        shape=tuple(map(int, entry["shape"])),
        offsets=tuple(map(int, offsets)),
        lengths=tuple(map(int, lengths)),
    )


def _adds_up(chunk: Chunk, blob_size: int) -> bool:
    if not len(chunk.shape) == len(chunk.offsets) == len(chunk.lengths):
        return False
    boxes = zip(chunk.shape, chunk.offsets, chunk.lengths, strict=True)
    return (
        all(min(at, length) >= 0 and at + length <= size for size, at, length in boxes)
        and chunk.nbytes == math.prod(chunk.lengths) * torch_dtype(chunk.dtype).itemsize
        and 0 <= chunk.offset <= blob_size - chunk.nbytes
    )


def trees_of(index: PartIndex) -> tuple[Any, Any]:
    """The shared tree (None but on rank 0) and the rank's own tree of a part; None when it has none."""
    tree = index.raw.get("tree", {})
    return tree.get("shared"), tree.get("local")
