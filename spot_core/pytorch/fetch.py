"""Bytes out of blobs, each checked on its way, straight into the memory they are meant for where that is possible.

A blob is digested in chunks, so chunks are what is read: those that hold a wanted byte, whole. Wanted bytes land in
their targets, the rest in a scratch buffer, and one pass over both checks the digest while they are in the cache.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch

from spot_core.digest import buffers_digest
from spot_core.errors import CorruptShardError, KeyMissingError, Reason, StoreError, TornGenerationError
from spot_core.pytorch.catalogue import Blob, Catalogue
from spot_core.pytorch.codec import torch_dtype
from spot_core.pytorch.index import Chunk

__all__ = ["Transfer", "fetch", "fetch_bytes", "memory"]

_MANY = 256
"""Above this number of targets in a chunk, copying out of a scratch buffer is cheaper than scattered reads."""

_WAVE_BYTES = 1 << 30
"""Targets that cannot be read into directly (devices, strided views) take at most about this much host memory."""


@dataclass(frozen=True)
class Transfer:
    """Fill `target` from the box of `chunk` that begins at `offsets` (in elements of the chunk) and has its shape."""

    chunk: Chunk
    target: torch.Tensor
    offsets: tuple[int, ...] = ()

    @classmethod
    def whole(cls, chunk: Chunk, target: torch.Tensor) -> Transfer:
        return cls(chunk, target, (0,) * len(chunk.lengths))


@dataclass
class _Wish:
    """Bytes of a blob and where they go."""

    offset: int
    target: memoryview


@dataclass
class _Landing:
    """A transfer that needs a buffer in between."""

    transfer: Transfer
    buffer: torch.Tensor
    strides: tuple[int, ...]

    def finish(self) -> None:
        target = self.transfer.target
        target.copy_(self.buffer.as_strided(tuple(target.shape), self.strides))


@dataclass
class _Wave:
    wishes: dict[str, list[_Wish]] = field(default_factory=dict)
    """By the blob's key."""
    landings: list[_Landing] = field(default_factory=list)
    nbytes: int = 0


def memory(tensor: torch.Tensor) -> memoryview:
    """The bytes of a contiguous CPU tensor, writable."""
    array: Any = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


@torch.no_grad()
def fetch(catalogue: Catalogue, transfers: Iterable[Transfer], *, threads: int = 4) -> None:
    """Carry out all transfers. On an error the targets hold arbitrary values.

    Raises CorruptShardError for bytes that are not those committed (URI, generation, rank, key and chunk are named),
    TornGenerationError for a blob that is gone, StoreError.
    """
    for wave in _waves(transfers):
        _run(catalogue, wave.wishes, threads)
        for landing in wave.landings:
            landing.finish()


def fetch_bytes(catalogue: Catalogue, names: Iterable[str], *, threads: int = 4) -> dict[str, bytes]:
    """The objects of these names. Raises as `fetch` does."""
    buffers: dict[str, bytearray] = {}
    wishes: dict[str, list[_Wish]] = {}
    for name in names:
        key, offset, size = catalogue.objects[name]
        buffers[name] = bytearray(size)
        if size:
            wishes.setdefault(key, []).append(_Wish(offset, memoryview(buffers[name])))
    _run(catalogue, wishes, threads)
    return {name: bytes(buffer) for name, buffer in buffers.items()}


def _waves(transfers: Iterable[Transfer]) -> Iterator[_Wave]:
    wave = _Wave()
    for transfer in sorted(transfers, key=lambda transfer: (transfer.chunk.key, transfer.chunk.offset)):
        if transfer.target.numel() == 0:
            continue
        _add(wave, transfer)
        if wave.nbytes >= _WAVE_BYTES:
            yield wave
            wave = _Wave()
    yield wave


def _add(wave: _Wave, transfer: Transfer) -> None:
    chunk, target = transfer.chunk, transfer.target
    dtype = torch_dtype(chunk.dtype)
    strides = tuple(math.prod(chunk.lengths[i + 1 :]) for i in range(len(chunk.lengths)))
    first = sum(at * stride for at, stride in zip(transfer.offsets, strides, strict=True))
    span = 1 + sum((length - 1) * stride for length, stride in zip(target.shape, strides, strict=True))
    buffer = target
    # The box is one run of bytes exactly when it has as many elements as lie between its first and its last.
    direct = span == target.numel() and target.is_cpu and target.is_contiguous() and target.dtype == dtype
    if not direct:
        buffer = torch.empty(span, dtype=dtype)
        wave.landings.append(_Landing(transfer, buffer, strides))
        wave.nbytes += buffer.nbytes
    wish = _Wish(chunk.offset + first * dtype.itemsize, memory(buffer))
    wave.wishes.setdefault(chunk.key, []).append(wish)


def _run(catalogue: Catalogue, wishes: dict[str, list[_Wish]], threads: int) -> None:
    with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="spot-load") as pool:
        jobs = [
            pool.submit(_read_chunk, catalogue, catalogue.blobs[key], number, parts)
            for key, wanted in wishes.items()
            for number, parts in _by_chunk(wanted, catalogue.blobs[key].chunk_size)
        ]
        done, _ = wait(jobs, return_when=FIRST_EXCEPTION)
        if any(job.exception() is not None for job in done):
            pool.shutdown(cancel_futures=True)
    for job in jobs:
        if not job.cancelled():
            job.result()


def _by_chunk(wishes: Iterable[_Wish], size: int) -> Iterator[tuple[int, list[_Wish]]]:
    """Cut wishes at chunk borders; chunks in order, and the wishes within."""
    found: dict[int, list[_Wish]] = {}
    for wish in sorted(wishes, key=lambda wish: wish.offset):
        offset, rest = wish.offset, wish.target
        while rest:
            number, within = divmod(offset, size)
            part, rest = rest[: size - within], rest[size - within :]
            found.setdefault(number, []).append(_Wish(offset, part))
            offset += len(part)
    yield from found.items()


def _read_chunk(catalogue: Catalogue, blob: Blob, number: int, wishes: Sequence[_Wish]) -> None:
    start = number * blob.chunk_size
    end = min(start + blob.chunk_size, blob.ref.size)
    buffers = _scatter(start, end, wishes) if len(wishes) <= _MANY else None
    copies = buffers is None
    if buffers is None:
        buffers = [_scratch(end - start)]
    place = f"chunk {number} (bytes {start} to {end}) of {blob.ref.key}, written by rank {blob.rank}"
    try:
        catalogue.store.get_ranges(blob.ref.key, [(start, buffers)], threads=1)
    except KeyMissingError as error:
        raise TornGenerationError(f"The {catalogue.where} is torn: {blob.ref.key} is missing.") from error
    except StoreError as error:
        if error.reason is not Reason.TRUNCATED:
            raise
        raise CorruptShardError(f"The {catalogue.where} is corrupt: {place}, is cut short.") from error
    if buffers_digest(buffers) != blob.digests[number]:
        raise CorruptShardError(f"The {catalogue.where} is corrupt: {place}, is not what was written.")
    if copies:
        for wish in wishes:
            wish.target[:] = buffers[0][wish.offset - start : wish.offset - start + len(wish.target)]
    catalogue.progress()


def _scatter(start: int, end: int, wishes: Sequence[_Wish]) -> list[memoryview] | None:
    """Buffers that take the chunk in order: targets, and scratch in between. None when targets overlap."""
    buffers: list[memoryview] = []
    at = start
    for wish in wishes:
        if wish.offset < at:
            return None
        if wish.offset > at:
            buffers.append(_scratch(wish.offset - at))
        buffers.append(wish.target)
        at = wish.offset + len(wish.target)
    if at < end:
        buffers.append(_scratch(end - at))
    return buffers


def _scratch(size: int) -> memoryview:
    """Memory that the system gets back with the last reference: malloc keeps some of what each thread gave back."""
    return memoryview(mmap.mmap(-1, size))
