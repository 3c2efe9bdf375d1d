"""Load a generation: the shared state, this rank's own, and exactly the bytes that these need."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from spot_core.errors import FormatError, ResumeMismatchError
from spot_core.layout import GenerationId
from spot_core.pytorch.bases import Held, Key, held_in
from spot_core.pytorch.catalogue import Catalogue
from spot_core.pytorch.codec import torch_dtype
from spot_core.pytorch.fetch import Transfer, fetch, fetch_bytes
from spot_core.pytorch.index import Chunk, local_prefix
from spot_core.pytorch.state import join, split
from spot_core.store import Store
from spot_core.verify import Verified

__all__ = ["LoadedState", "load", "read_tensors", "transfer_of"]


@dataclass(frozen=True)
class LoadedState:
    """What `load` made of a generation."""

    shared: Any
    """The shared state, with whole tensors on the CPU, or the template's own."""
    local: Any | None
    """The state that this rank saved for itself; None when the saving world had no such rank."""
    generation: GenerationId
    same_world: bool
    """True when as many ranks load as saved: then `local` is exactly what this rank had."""
    missing: tuple[str, ...]
    """Tensors of the template that the generation does not have; they were left alone."""
    world_size: int
    """The number of ranks that saved."""
    held: Mapping[Key, Held]
    """What later generations may refer to."""
    nearest: Any
    """`local`, or for a rank that has none rank 0's: what is alike on all ranks stands there."""
    _read: Callable[[int], Any] = field(repr=False, compare=False)

    def local_of(self, rank: int) -> Any:
        """The state that any saving rank had of its own, read when asked for.

        Raises KeyError for a rank that did not save, and as `load` does.
        """
        return self._read(rank)


def load(
    store: Store,
    verified: Verified,
    *,
    rank: int,
    world: int,
    template: Any = None,
    threads: int = 4,
    allow_pickle: bool = False,
    progress: Callable[[], None] = lambda: None,
) -> LoadedState:
    """Read the state that `rank` of `world` needs; every byte is checked against its digest on the way.

    Not collective: ranks load independently of each other.

    template: a nested state, or a dict by fqn, whose tensors are filled in place instead of new ones being made:
        parameters on a device, or DTensors, which get the box they hold, however the generation was sharded. They are
        in the result where the generation has them. dtypes are converted.
    allow_pickle: also load what was saved as a pickle; it runs code from the generation.
    progress: called, by any thread, whenever a few megabytes more are read.

    Raises CorruptShardError, TornGenerationError or FormatError for damage (try the next older generation; the
    template holds arbitrary values then), ResumeMismatchError for a template of other shapes, StoreError, ConfigError
    for a pickled object without `allow_pickle`.
    """
    catalogue = Catalogue.read(store, verified, threads=threads, progress=progress)
    if catalogue.shared_tree is None:
        raise FormatError(f"The {catalogue.where} holds no training state: it was written by something else.")
    wanted = {} if template is None else split(template, droppable=("",)).tensors
    known = {fqn: tensor for fqn, tensor in wanted.items() if fqn in catalogue.tensors or fqn in catalogue.aliases}
    filled = {catalogue.aliases.get(fqn, fqn): tensor for fqn, tensor in known.items()}
    transfers = _into(catalogue, known)
    made = _new_tensors(catalogue, [fqn for fqn in catalogue.shared_names() if fqn not in filled], transfers)
    whose = rank if rank < catalogue.world_size else 0
    mine = _new_tensors(catalogue, catalogue.local_names(whose), transfers)
    fetch(catalogue, transfers, threads=threads)
    others = tuple(local_prefix(other) for other in catalogue.local_trees if other != whose)
    objects = fetch_bytes(catalogue, [n for n in catalogue.objects if not n.startswith(others)], threads=threads)

    shared = join(catalogue.shared_tree, {**made, **filled}, objects, allow_pickle=allow_pickle)
    nearest = _local(catalogue, whose, mine, objects, allow_pickle=allow_pickle)
    return LoadedState(
        shared,
        nearest if whose == rank else None,
        catalogue.generation,
        catalogue.world_size == world,
        tuple(fqn for fqn in wanted if fqn not in known),
        catalogue.world_size,
        held_in(catalogue.bases),
        nearest,
        lambda other: _read_local(catalogue, other, threads=threads, allow_pickle=allow_pickle),
    )


def _read_local(catalogue: Catalogue, rank: int, *, threads: int, allow_pickle: bool) -> Any:
    if rank not in catalogue.local_trees:
        raise KeyError(f"{catalogue.where} was saved by {catalogue.world_size} ranks: there is no rank {rank}")
    tensors = read_tensors(catalogue, catalogue.local_names(rank), threads=threads)
    prefix = local_prefix(rank)
    objects = fetch_bytes(catalogue, [n for n in catalogue.objects if n.startswith(prefix)], threads=threads)
    return _local(catalogue, rank, tensors, objects, allow_pickle=allow_pickle)


def _local(
    catalogue: Catalogue,
    rank: int,
    tensors: Mapping[str, torch.Tensor],
    objects: Mapping[str, bytes],
    *,
    allow_pickle: bool,
) -> Any:
    prefix = local_prefix(rank)
    tree = catalogue.local_trees[rank]
    return join(tree, _without(prefix, tensors), _without(prefix, objects), allow_pickle=allow_pickle)


def read_tensors(catalogue: Catalogue, names: Iterable[str], *, threads: int = 4) -> dict[str, torch.Tensor]:
    """Whole tensors of these names, in new CPU memory. Raises as `fetch` does."""
    transfers: list[Transfer] = []
    made = _new_tensors(catalogue, names, transfers)
    fetch(catalogue, transfers, threads=threads)
    return made


def transfer_of(catalogue: Catalogue, planner: LoadPlanner, item: ReadItem) -> Transfer:
    """The transfer that a DCP read item asks for."""
    offset = tuple(item.storage_index.offset or ())
    chunk = next(chunk for chunk in catalogue.chunks(item.storage_index.fqn) if chunk.offsets == offset)
    return Transfer(chunk, planner.resolve_tensor(item).detach(), tuple(item.storage_offsets))


def _new_tensors(catalogue: Catalogue, names: Iterable[str], transfers: list[Transfer]) -> dict[str, torch.Tensor]:
    made: dict[str, torch.Tensor] = {}
    for fqn in names:
        chunks = catalogue.chunks(fqn)
        made[fqn] = torch.empty(chunks[0].shape, dtype=torch_dtype(chunks[0].dtype))
        transfers.extend(Transfer.whole(chunk, _box(made[fqn], chunk)) for chunk in chunks)
    return made


def _box(tensor: torch.Tensor, chunk: Chunk) -> torch.Tensor:
    for dim, (at, length) in enumerate(zip(chunk.offsets, chunk.lengths, strict=True)):
        tensor = tensor.narrow(dim, at, length)
    return tensor


def _into(catalogue: Catalogue, template: Mapping[str, torch.Tensor]) -> list[Transfer]:
    if not template:
        return []
    planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    metadata = catalogue.metadata()
    planner.set_up_planner(dict(template), Metadata({fqn: metadata[fqn] for fqn in template}), is_coordinator=False)
    try:
        items = planner.create_local_plan().items
    except ValueError as error:
        raise ResumeMismatchError(
            f"The {catalogue.where} does not fit the model: {error}",
            hint="The run belongs to another configuration; choose another run location, or restore the configuration.",
        ) from error
    return [transfer_of(catalogue, planner, item) for item in items if item.type is LoadItemType.TENSOR]


def _without(prefix: str, named: Mapping[str, Any]) -> dict[str, Any]:
    return {name.removeprefix(prefix): value for name, value in named.items() if name.startswith(prefix)}
