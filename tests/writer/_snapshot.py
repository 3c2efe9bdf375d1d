"""A stand-in for the planner, and the way back from a part to bytes."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from spot_core.digest import chunk_digest
from spot_core.layout import GenerationId, PartTarget, part_target
from spot_core.manifest import Part
from spot_core.parts import PartIndex
from spot_core.pytorch.stage import Stager
from spot_core.store import Store
from spot_core.writer import WriteJob, WriterClient


@dataclass(frozen=True)
class Item:
    tensor: torch.Tensor
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Plan:
    items: list[Item]
    size: int
    bases: tuple[Item, ...] = ()

    @property
    def base_start(self) -> int:
        return self.size

    @property
    def room(self) -> int:
        return self.size


def plan_of(tensors: Iterable[torch.Tensor]) -> Plan:
    """Each tensor at the next multiple of 64 bytes."""
    items, end = [], 0
    for tensor in tensors:
        start = -(-end // 64) * 64
        items.append(Item(tensor, start, tensor.nbytes))
        end = start + tensor.nbytes
    return Plan(items, end)


def target(step: int, rank: int = 0) -> PartTarget:
    return part_target(GenerationId(1, step), "a0", rank)


def raw(tensor: torch.Tensor) -> bytes:
    """The tensor's values as contiguous bytes."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


def save(
    client: WriterClient, stager: Stager, plan: Plan, stable: Any, step: int, **index: Any
) -> tuple[Future[Part], PartTarget]:
    """Stage and submit, as a session does; the caller waits."""
    stager.stage(plan, stable)
    where = target(step)
    future = client.submit(WriteJob(0, where, plan.size, index))
    stager.go()
    return future, where


def blob_bytes(store: Store, part: Part) -> bytes:
    """The blob, after checking size, the index's digest, and every chunk's digest against it."""
    index = PartIndex.read(store, part)
    if part.blob is None:
        return b""
    data = store.get(part.blob.key)
    assert len(data) == part.blob.size
    for i, digest in enumerate(index.digests):
        assert chunk_digest(data[i * index.chunk_size : (i + 1) * index.chunk_size]) == digest, f"chunk {i}"
    return data


def saved(store: Store, part: Part, plan: Plan) -> list[bytes]:
    data = blob_bytes(store, part)
    return [data[item.offset : item.offset + item.nbytes] for item in plan.items]
