"""Who writes what: torch.distributed.checkpoint's planner, asked once, and its answer laid out in each rank's blob.

`shared` tensors that several ranks hold alike are written once, big ones by the rank that has least to write, small and
pinned ones by the lowest rank that holds them; each owner writes its shards of a sharded one. `local` tensors are
written by their rank.

DCP's planning gathers every rank's whole list on one rank. Its answer depends only on names, shapes, dtypes and
placements, so it is kept as long as these stay the same *on every rank*; one all-reduce of one number per save finds
that out. (DCP's own plan cache compares each rank's list alone, ignores dtypes, and is shared by the whole process.)
"""

from __future__ import annotations

import dataclasses
import math
import weakref
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.utils import find_state_dict_object
from torch.distributed.tensor import DTensor

from spot_core.errors import ConfigError, SaveError
from spot_core.parts import ALIGNMENT
from spot_core.pytorch.codec import torch_name
from spot_core.pytorch.index import Chunk, chunks_json, index_document, local_prefix
from spot_core.writer.job import RawJson
from spot_core.writer.slab import round_up

__all__ = ["BaseItem", "PlannedItem", "Planner", "RankPlan", "SameTensors"]

SMALL_BYTES = 64 << 10
"""Replicated tensors below this size come from the lowest rank: DDP broadcasts rank 0's buffers, so its are the true
ones, and counters are not worth spreading."""

_FAILED, _CHANGED, _SAME = 0, 1, 2


class SameTensors(dict[str, torch.Tensor]):
    """Tensors by fqn that stay what they are: the object given to `Planner.plan` again says that nothing but values
    changed. (A plain dict says no such thing, nor can it be referred to weakly.)"""


@dataclass(frozen=True)
class PlannedItem:
    """One local tensor to copy into the blob: `nbytes` bytes, row-major, from `offset` on."""

    fqn: str
    tensor: torch.Tensor
    """Any device, any strides; live."""
    offset: int
    nbytes: int


@dataclass(frozen=True)
class BaseItem(PlannedItem):
    """One that is not expected to change, and lies apart from the rest; `offset` counts from `RankPlan.base_start`."""

    chunk: Chunk

    @property
    def key(self) -> tuple[str, str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """Which box of which tensor this is."""
        return self.fqn, self.chunk.dtype, self.chunk.shape, self.chunk.offsets, self.chunk.lengths

    def chunk_at(self, offset: int) -> Chunk:
        return dataclasses.replace(self.chunk, offset=offset)

    def next_offset(self, offset: int) -> int:
        """Where the next one begins when this one lies at `offset`."""
        return _aligned(offset + self.nbytes)


@dataclass(frozen=True, eq=False)
class RankPlan:
    """What this rank writes. The same object as for the save before when every tensor is the same memory as then."""

    rank: int
    world_size: int
    items: tuple[PlannedItem, ...]
    size: int
    """Bytes of the blob; between the items it holds arbitrary padding."""
    tensors: RawJson
    objects: Mapping[str, tuple[int, int]]
    bases: tuple[BaseItem, ...] = ()
    """Further items, not of the blob (see `bases`)."""
    base_size: int = 0
    bound: tuple[torch.Tensor, ...] = ()
    """The tensors of all items but objects, in the planner's order."""

    @property
    def base_start(self) -> int:
        """Where in the slab the items of `bases` begin, on a page."""
        return round_up(self.size)

    @property
    def room(self) -> int:
        """Bytes of the slab that a snapshot takes."""
        return self.base_start + self.base_size if self.bases else self.size

    def index(self, shared_tree: Any, local_tree: Any) -> dict[str, Any]:
        """The index that belongs to the blob, for a `WriteJob`."""
        return index_document(
            self.rank,
            self.world_size,
            tensors=self.tensors,
            objects=self.objects,
            shared_tree=shared_tree,
            local_tree=local_tree,
        )


@dataclass(frozen=True)
class _Slot:
    fqn: str  # as in the index, with the rank's prefix for local ones
    key: str  # in the caller's dict
    shared: bool
    where: MetadataIndex  # which shard
    chunk: Chunk
    base: bool = False


@dataclass(frozen=True)
class _Layout:
    slots: tuple[_Slot, ...]
    """The shared ones first."""
    shared_slots: int
    size: int
    base_size: int
    tensors: RawJson


class Planner:
    """Plans the saves of one rank; all ranks of `group` call it alike. Without a group it plans for a world of one.

    `group` is a gloo group (or any that can move Python objects and CPU tensors) in which nobody else communicates
    meanwhile; global rank order.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.world_size = 1 if group is None else dist.get_world_size(group)
        self._shared_form: list[tuple[Any, ...]] | None = None
        self._local_form: list[tuple[Any, ...]] | None = None
        self._pinned: Set[str] = frozenset()
        self._apart: tuple[Set[int], Set[str]] = (frozenset(), frozenset())
        self._draft: tuple[list[tuple[Any, ...]], SavePlan | str] | None = None
        self._mine: tuple[WriteItem, ...] = ()
        self._layout: _Layout | None = None
        self._addresses: list[tuple[Any, ...]] = []
        # The shared tensors of the save before: when the very same object comes again, nothing is asked of them again.
        self._shared: weakref.ref[SameTensors] | None = None
        # Small tensors that are made anew for every save (RNG states, arrays) are copied here, by slot, so that the
        # plan stays the same object, which spares the stager its own work on thousands of others.
        self._buffers: dict[int, torch.Tensor] = {}
        self._last: weakref.ref[RankPlan] | None = None

    @torch.no_grad()
    def plan(
        self,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        *,
        shared_objects: Mapping[str, bytes] | None = None,
        local_objects: Mapping[str, bytes] | None = None,
        pinned: Set[str] = frozenset(),
        apart: Set[int] = frozenset(),
        mutable: Set[str] = frozenset(),
    ) -> RankPlan:
        """Collective over the group: the plan for this rank.

        shared: tensors by fqn, plain ones the same on every rank that has them, or DTensor / ShardedTensor shards. The
            very `SameTensors` of the call before is taken to hold what it held then.
        local: this rank's own, stored under ``rank<rank>.<fqn>``.
        shared_objects, local_objects: bytes by fqn; shared ones are rank 0's.
        pinned: shared fqns that must come from the lowest rank holding them, whatever their size.
        apart: addresses of the storages of tensors that are not expected to change (this rank's): unless they are
            small, or `mutable` names them, they are planned as `RankPlan.bases`.

        Raises, on every rank, SaveError when the ranks' states do not fit together or one of them could not plan;
        ConfigError for placements that hold no values (Partial). Nothing was written then.
        """
        if self._shared is not None and self._shared() is not shared:
            self._shared = None
        known = self._shared_form if self._shared is not None else None
        form = known if known is not None else _form(shared)
        same = form == self._shared_form and pinned == self._pinned
        if self._agree(_SAME if same else _CHANGED) != _SAME:
            self._shared_form = self._layout = self._shared = None
            self._mine = self._plan_together(shared, form, pinned)
            self._shared_form, self._pinned = form, frozenset(pinned)
        local_form = _form(local)
        if self._layout is None or local_form != self._local_form or (apart, mutable) != self._apart:
            self._apart = (apart, mutable)
            self._layout = self._lay_out(shared, local)
            self._local_form, self._last, self._addresses, self._buffers = local_form, None, [], {}
            self._shared = None
        mine = dict(shared_objects or {}) if self.rank == 0 else {}
        mine.update({local_prefix(self.rank) + fqn: data for fqn, data in (local_objects or {}).items()})
        return self._bind(self._layout, shared, local, mine)

    def draft(self, shared: Mapping[str, torch.Tensor]) -> None:
        """Not collective: what this rank would say of `shared` in the first `plan`, which takes DCP milliseconds."""
        self._draft = (_form(shared), _attempt(lambda: _local_plan(shared)))

    def fail(self) -> None:
        """Collective, in place of `plan`: this rank has no state to save; `plan` raises SaveError on the others."""
        self._agree(_FAILED)

    def _agree(self, mine: int) -> int:
        if self._group is None:
            return mine
        word = torch.tensor([mine])
        dist.all_reduce(word, op=dist.ReduceOp.MIN, group=self._group)
        agreed = int(word.item())
        if agreed == _FAILED and mine != _FAILED:
            raise SaveError("Another rank could not take its state apart, so nothing was saved; its log says why.")
        return agreed

    def _plan_together(
        self, shared: Mapping[str, torch.Tensor], form: list[tuple[Any, ...]], pinned: Set[str]
    ) -> tuple[WriteItem, ...]:
        draft, self._draft = self._draft, None
        mine = draft[1] if draft is not None and draft[0] == form else _attempt(lambda: _local_plan(shared))
        plan = self._exchange(mine, lambda plans: _global_plan(plans, pinned))
        order = {fqn: i for i, fqn in enumerate(shared)}
        return tuple(sorted(plan.items, key=lambda item: order[item.index.fqn]))

    def _exchange(self, mine: SavePlan | str, together: Callable[[list[SavePlan]], list[SavePlan]]) -> SavePlan:
        """Gather on the first rank, let `together` decide there, scatter; an error anywhere is raised everywhere."""
        gathered: list[Any] = [mine]
        if self._group is not None:
            gathered = [None] * self.world_size
            first = dist.get_global_rank(self._group, 0)
            dist.gather_object(mine, gathered if self.rank == 0 else None, dst=first, group=self._group)
        answers: list[Any] = [None] * self.world_size
        if self.rank == 0:
            failures = [f"rank {rank}: {plan}" for rank, plan in enumerate(gathered) if isinstance(plan, str)]
            answer = "; ".join(failures) if failures else _attempt(lambda: together(gathered))
            answers = [answer] * self.world_size if isinstance(answer, str) else answer
        answered: list[Any] = answers[:1]
        if self._group is not None:
            answered = [None]
            dist.scatter_object_list(answered, answers if self.rank == 0 else None, src=first, group=self._group)
        if isinstance(answered[0], str):
            raise SaveError(f"The save could not be planned: {answered[0]} Nothing was written.")
        plan: SavePlan = answered[0]
        return plan

    def _lay_out(self, shared: Mapping[str, torch.Tensor], local: Mapping[str, torch.Tensor]) -> _Layout:
        slots: list[_Slot] = []
        at = base_at = 0
        apart, mutable = self._apart
        for item in self._mine:
            data, fqn = item.tensor_data, item.index.fqn
            assert data is not None  # plans hold tensors only
            lengths, dtype = tuple(data.chunk.sizes), data.properties.dtype
            nbytes = math.prod(lengths) * dtype.itemsize
            offsets, shape = tuple(data.chunk.offsets), tuple(data.size)
            chunk = Chunk(at, nbytes, torch_name(dtype), shape, offsets, lengths)
            slot = _Slot(fqn, fqn, True, item.index, chunk)
            expected = apart and nbytes >= SMALL_BYTES and fqn not in mutable
            if expected and _storage(_local_tensor(shared, slot)) in apart:
                slot = dataclasses.replace(slot, chunk=dataclasses.replace(chunk, offset=base_at), base=True)
                base_at = _aligned(base_at + nbytes)
            else:
                at = _aligned(at + nbytes)
            slots.append(slot)
        shared_slots = len(slots)
        for fqn, tensor in local.items():
            shape = tuple(tensor.shape)
            chunk = Chunk(at, tensor.nbytes, torch_name(tensor.dtype), shape, (0,) * len(shape), shape)
            slots.append(_Slot(local_prefix(self.rank) + fqn, fqn, False, MetadataIndex(fqn), chunk))
            at = _aligned(at + tensor.nbytes)
        named = [(slot.fqn, slot.chunk) for slot in slots if not slot.base]
        return _Layout(tuple(slots), shared_slots, at, base_at, chunks_json(named))

    def _bind(
        self,
        layout: _Layout,
        shared: Mapping[str, torch.Tensor],
        local: Mapping[str, torch.Tensor],
        objects: Mapping[str, bytes],
    ) -> RankPlan:
        last = self._last() if self._last is not None else None
        known = layout.shared_slots if last is not None and self._shared is not None else 0
        tensors = list(last.bound[:known]) if last is not None else []
        tensors += [_local_tensor(shared if slot.shared else local, slot) for slot in layout.slots[known:]]
        for i, buffer in self._buffers.items():
            made = _local_tensor(shared, layout.slots[i]) if i < known else tensors[i]
            tensors[i] = buffer.copy_(made)
        addresses = self._addresses[:known] + [_address(tensor) for tensor in tensors[known:]]
        self._shared = weakref.ref(shared) if isinstance(shared, SameTensors) else None
        # The old plan keeps its memory alive, so an equal address is the same memory.
        if last is not None and addresses == self._addresses and not objects and not last.objects:
            return last
        for i, tensor in enumerate(tensors):
            # A rank's own small ones are seldom the same memory twice, which the second save would be the one to find.
            moved = addresses[i] != self._addresses[i] if self._addresses else i >= layout.shared_slots
            if moved and _may_be_buffered(tensor):
                tensors[i] = self._buffers[i] = tensors[i].clone(memory_format=torch.contiguous_format)
                addresses[i] = _address(tensors[i])
        bound = list(zip(layout.slots, tensors, strict=True))
        items = [
            PlannedItem(slot.fqn, tensor, slot.chunk.offset, slot.chunk.nbytes)
            for slot, tensor in bound
            if not slot.base
        ]
        bases = [
            BaseItem(slot.fqn, tensor, slot.chunk.offset, slot.chunk.nbytes, slot.chunk)
            for slot, tensor in bound
            if slot.base
        ]
        at, places = layout.size, {}
        for fqn, data in objects.items():
            places[fqn] = (at, len(data))
            items.append(PlannedItem(fqn, torch.frombuffer(bytearray(data), dtype=torch.uint8), at, len(data)))
            at = _aligned(at + len(data))
        plan = RankPlan(
            self.rank,
            self.world_size,
            tuple(items),
            at,
            layout.tensors,
            places,
            tuple(bases),
            layout.base_size,
            tuple(tensors),
        )
        self._addresses, self._last = addresses, weakref.ref(plan)
        return plan


def _address(tensor: torch.Tensor) -> tuple[Any, ...]:
    return (tensor.data_ptr(), tensor.stride(), tensor.device)


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _may_be_buffered(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.nbytes <= SMALL_BYTES


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


def _attempt(do: Callable[[], Any]) -> Any:
    """The result, or the error as text: what one rank raises must not leave the others waiting."""
    try:
        return do()
    except Exception as error:  # noqa: BLE001 - raised on every rank by the caller
        return f"{type(error).__name__}: {error}"


def _form(tensors: Mapping[str, torch.Tensor]) -> list[tuple[Any, ...]]:
    """What a plan depends on, of each tensor; not where it lies."""
    return [
        (fqn, tensor.shape, tensor.dtype)
        if type(tensor) is torch.Tensor
        else (fqn, tensor.shape, tensor.dtype, type(tensor), *_placement(tensor))
        for fqn, tensor in tensors.items()
    ]


def _placement(tensor: torch.Tensor) -> tuple[Any, ...]:
    if isinstance(tensor, DTensor):
        return (tensor.placements, tensor.device_mesh, tensor.to_local().shape)
    metadata = getattr(tensor, "metadata", None)  # ShardedTensor
    return (repr(metadata().shards_metadata),) if callable(metadata) else ()


def _local_tensor(tensors: Mapping[str, torch.Tensor], slot: _Slot) -> torch.Tensor:
    tensor = tensors[slot.key]
    if type(tensor) is torch.Tensor:
        return tensor
    if slot.shared:
        local: torch.Tensor = find_state_dict_object({slot.key: tensor}, slot.where)
        return local.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _local_plan(shared: Mapping[str, torch.Tensor]) -> SavePlan:
    for fqn, tensor in shared.items():
        if isinstance(tensor, DTensor) and any(placement.is_partial() for placement in tensor.placements):
            raise ConfigError(f"{fqn!r} has a Partial placement: no rank holds its values. Reduce it before the save.")
    planner = DefaultSavePlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
    planner.set_up_planner(dict(shared))
    plan = planner.create_local_plan()
    # Uneven sharding leaves ranks with nothing; DCP would place all of these empty boxes at the same offset.
    return dataclasses.replace(plan, items=[item for item in plan.items if not _is_hollow(item)])


def _is_hollow(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and 0 in data.chunk.sizes and 0 not in data.size


def _is_whole(item: WriteItem) -> bool:
    data = item.tensor_data
    return data is not None and data.chunk.sizes == data.size


def _global_plan(plans: list[SavePlan], pinned: Set[str]) -> list[SavePlan]:
    """One writer for every box of every tensor. Raises ValueError when boxes overlap or leave a gap."""
    plans = _assign(plans, pinned)
    if all(_is_whole(item) for plan in plans for item in plan.items):
        return plans  # nothing is sharded, and everything has one writer: no boxes to check against each other
    final, _ = DefaultSavePlanner(flatten_state_dict=False).create_global_plan(plans)
    return final


def _assign(plans: list[SavePlan], pinned: Set[str]) -> list[SavePlan]:
    holders: dict[MetadataIndex, list[int]] = {}
    said: dict[str, tuple[int, tuple[Any, ...]]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            data = item.tensor_data
            assert data is not None  # plans hold tensors only
            form = (tuple(data.size), torch_name(data.properties.dtype))
            first, other = said.setdefault(item.index.fqn, (rank, form))
            if form != other:
                raise ConfigError(
                    f"{item.index.fqn!r} has shape {form[0]} and dtype {form[1]} on rank {rank}, but {other[0]} and "
                    f"{other[1]} on rank {first}.",
                    hint="What differs between ranks belongs to each rank's local state.",
                )
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = math.prod(data.chunk.sizes) * data.properties.dtype.itemsize
    load = [0] * len(plans)
    owner: dict[MetadataIndex, int] = {}
    free: list[MetadataIndex] = []
    for index, ranks in holders.items():
        if len(ranks) == 1 or sizes[index] < SMALL_BYTES or index.fqn in pinned:
            owner[index] = ranks[0]
            load[ranks[0]] += sizes[index]
        else:
            free.append(index)
    for index in sorted(free, key=lambda index: -sizes[index]):  # stable: equal sizes stay in order
        owner[index] = min(holders[index], key=lambda rank: load[rank])
        load[owner[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=[item for item in plan.items if owner[item.index] == rank])
        for rank, plan in enumerate(plans)
    ]
