"""Big files on a POSIX file system at the disk's own speed: writes past the page cache, reads into the caller's memory.

O_DIRECT moves pages between the disk and the given memory without a copy and without dirty pages piling up in front
of the final fsync. It wants memory, offset and length on block boundaries: a source gives that as `padded_chunk`, and
the file is cut to its size afterwards. Where a file system refuses it (tmpfs, some overlay and network file systems)
the same loop writes through the page cache.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor, wait
from pathlib import Path

from spot_core.store._base import BlobSource, chunk_count
from spot_core.store._pieces import pieces
from spot_core.store._teams import team

__all__ = ["read_ranges", "write_file"]

_ALIGN = 4096
_WRITE_THREADS = 4
_READ_BYTES = 8 << 20
_READ_BUFFERS = 512  # below every system's limit of buffers per preadv
_REFUSED = {errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP}


def write_file(path: Path, source: BlobSource, *, threads: int = _WRITE_THREADS) -> None:
    """Create `path` with the bytes of `source`, and fsync it (not its folder).

    Chunks are written by `threads` threads, each as soon as the source has it. A file that could not be finished is
    removed.

    Raises FileExistsError when `path` exists (and leaves it alone), OSError for what the file system does, and what
    `source` raises.
    """
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        try:
            with _direct_fd(path) as direct:
                if source.size and direct is not None:
                    # Extents allocated ahead keep the file in one piece and tell of a full disk before the first byte.
                    # (Not for the buffered path: where this is emulated, it writes to every block.)
                    os.posix_fallocate(fd, 0, -(-source.size // _ALIGN) * _ALIGN)
                with team(threads) as writers:
                    chunks = range(chunk_count(source))
                    _each(chunks, lambda i: _write_chunk(fd, direct, source, i), writers, threads)
            os.ftruncate(fd, source.size)
            os.fsync(fd)
        finally:
            os.close(fd)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(path)
        raise


def read_ranges(path: Path, ranges: Sequence[tuple[int, Sequence[memoryview]]], threads: int = 4) -> None:
    """Fill the buffers of each range contiguously from its offset in bytes, in parallel and without a copy in between.

    Raises FileNotFoundError, EOFError when the file ends before a range does, OSError otherwise.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        todo = list(pieces(ranges, max_bytes=_READ_BYTES, max_buffers=_READ_BUFFERS))
        with ThreadPoolExecutor(max(threads, 1), thread_name_prefix="spot-io") as readers:
            _each(todo, lambda piece: _read_piece(fd, *piece), readers, threads)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _direct_fd(path: Path) -> Iterator[int | None]:
    """A second descriptor for O_DIRECT: an O_DIRECT open that is refused may have created the file already."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC)
    except AttributeError:  # a system without O_DIRECT
        yield None
        return
    except OSError as error:
        if error.errno not in _REFUSED:
            raise
        yield None
        return
    try:
        yield fd
    finally:
        os.close(fd)


def _write_chunk(fd: int, direct: int | None, source: BlobSource, i: int) -> None:
    offset = i * source.chunk_size
    if direct is not None:
        padded = source.padded_chunk(i)
        if padded is not None:
            try:
                _write_all(direct, padded, offset)
            except OSError as error:
                if error.errno not in _REFUSED:  # a device with larger blocks refuses here, not at the open
                    raise
            else:
                return
    _write_all(fd, source.chunk(i), offset)


def _write_all(fd: int, data: memoryview, offset: int) -> None:
    while data:
        written = os.pwrite(fd, data, offset)
        data, offset = data[written:], offset + written


def _read_piece(fd: int, offset: int, buffers: list[memoryview]) -> None:
    while buffers:
        count = os.preadv(fd, buffers, offset)
        if not count:
            raise EOFError(f"it ends before byte {offset + sum(map(len, buffers))}")
        offset += count
        while buffers and count >= len(buffers[0]):
            count -= len(buffers.pop(0))
        if count:
            buffers[0] = buffers[0][count:]


def _each(items: Sequence[object], do: Callable[..., None], pool: Executor, threads: int) -> None:
    """Call `do` with every item, in order, on up to `threads` of the pool's; the first error ends all and is raised."""
    pending, lock, failed = iter(items), threading.Lock(), threading.Event()

    def work() -> None:
        while not failed.is_set():
            with lock:
                item = next(pending, failed)
            if item is failed:
                return
            try:
                do(item)
            except BaseException:
                failed.set()
                raise

    workers = [pool.submit(work) for _ in range(min(threads, len(items)))]
    wait(workers)
    for worker in workers:
        worker.result()
