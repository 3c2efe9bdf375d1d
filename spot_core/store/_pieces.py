"""Cutting ranges into requests: small buffers joined, large ones split, so that each request is of useful size."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

__all__ = ["pieces", "read_pieces", "scatter"]

_REQUEST = 16 << 20
"""Bytes asked of an object store at a time."""


def pieces(
    ranges: Sequence[tuple[int, Sequence[memoryview]]], *, max_bytes: int, max_buffers: int | None = None
) -> Iterator[tuple[int, list[memoryview]]]:
    """Offsets, and the buffers to fill contiguously from each, of at most `max_bytes` in at most `max_buffers`."""
    for start, buffers in ranges:
        offset, piece, size = start, list[memoryview](), 0
        for buffer in buffers:
            rest = buffer.cast("B") if buffer.format != "B" or buffer.ndim != 1 else buffer
            while rest:
                part, rest = rest[: max_bytes - size], rest[max_bytes - size :]
                piece.append(part)
                size += len(part)
                if size == max_bytes or len(piece) == max_buffers:
                    yield offset, piece
                    offset, piece, size = offset + size, [], 0
        if piece:
            yield offset, piece


def read_pieces(
    ranges: Sequence[tuple[int, Sequence[memoryview]]],
    fill: Callable[[int, Sequence[memoryview]], None],
    threads: int,
) -> None:
    """`fill` every piece of `ranges`, one request each, on up to `threads` threads; the first error is raised."""
    requests = list(pieces(ranges, max_bytes=_REQUEST))
    if len(requests) == 1:
        fill(*requests[0])
        return
    with ThreadPoolExecutor(max(1, min(threads, len(requests))), thread_name_prefix="spot-read") as pool:
        for _ in pool.map(lambda request: fill(*request), requests):
            pass


def scatter(data: memoryview, buffers: Sequence[memoryview]) -> None:
    """Copy `data` into `buffers`, which have its length in all."""
    at = 0
    for buffer in buffers:
        buffer[:] = data[at : at + len(buffer)]
        at += len(buffer)
