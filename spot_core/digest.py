"""Digests of what a save writes: one spelling for the writer, for `verify` and for the loader.

Blobs are digested per chunk, so that chunks can be written, read and checked in parallel and a bit flip can be named
by its place. The digest of the whole blob is taken over the concatenated binary chunk digests; the chunk digests
themselves stand in the part's index under the key ``"chunks"``::

    {"algorithm": "xxh3_128", "size": 8388608, "digests": ["<hex>", ...]}

``size`` is in bytes; the last chunk may be shorter. XXH3 is not cryptographic: it finds damage, not forgery.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeAlias

import xxhash

Buffer: TypeAlias = bytes | bytearray | memoryview

ALGORITHM = "xxh3_128"
CHUNK_SIZE = 8 << 20
"""Bytes per chunk: large enough to reach the disk's limit with a few threads, a multiple of the page size."""

CHUNKS_KEY = "chunks"
"""Where the chunk digests stand in a part's index."""


def bytes_digest(data: Buffer) -> str:
    """Digest of a small object, as `ObjectRef.digest` spells it."""
    return f"{ALGORITHM}:{xxhash.xxh3_128_hexdigest(data)}"


def chunk_digest(data: Buffer) -> bytes:
    """The 16-byte digest of one chunk. Releases the GIL while it runs."""
    return xxhash.xxh3_128_digest(data)


def buffers_digest(buffers: Iterable[Buffer]) -> bytes:
    """`chunk_digest` of a chunk that lies in several pieces."""
    digest = xxhash.xxh3_128()
    for buffer in buffers:
        digest.update(buffer)
    return digest.digest()


def tree_digest(chunk_digests: Iterable[bytes]) -> str:
    """Digest of a blob, over its chunks' binary digests in order, as `ObjectRef.digest` spells it."""
    return f"{ALGORITHM}-tree:{xxhash.xxh3_128_hexdigest(b''.join(chunk_digests))}"


def chunks_entry(chunk_digests: Iterable[bytes], chunk_size: int = CHUNK_SIZE) -> dict[str, object]:
    """The value that stands under `CHUNKS_KEY` in an index."""
    return {"algorithm": ALGORITHM, "size": chunk_size, "digests": [digest.hex() for digest in chunk_digests]}


def parse_chunks_entry(entry: Mapping[str, object]) -> tuple[int, list[bytes]]:
    """Chunk size in bytes and the binary chunk digests of an index's `CHUNKS_KEY` entry.

    Raises ValueError for an entry that this version cannot read.
    """
    algorithm, size, digests = entry.get("algorithm"), entry.get("size"), entry.get("digests")
    if algorithm != ALGORITHM or not isinstance(size, int) or size <= 0 or not isinstance(digests, list):
        raise ValueError(f"unreadable chunk digests: algorithm {algorithm!r}, chunk size {size!r}")
    return size, [bytes.fromhex(digest) for digest in digests]
