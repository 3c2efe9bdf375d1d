"""The slab: memory shared by the trainer, which copies its state in, and the writer, which copies it out to the store.

Layout: one header page whose first 8 bytes are the watermark (native endian; bytes of the data area that hold the
snapshot, counted from its start), then the data area. Both start on a page boundary, so that the data can be written
with O_DIRECT from where it stands.

The memory has no name (memfd, or an unlinked temporary file): nothing of it stays behind however the processes end.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import tempfile
import threading
import weakref

PAGE = 4096
"""Alignment of the data area and of its end; O_DIRECT's usual logical block, whatever the machine's page size."""

_PREFAULT_STEP = 16 << 20
"""Bytes per madvise call: the call holds the address space's lock, which the trainer's own allocations need."""

_MADV_POPULATE_WRITE = 23  # Linux 5.14; not in the mmap module
_WATERMARK_BYTES = 8


def round_up(nbytes: int, unit: int = PAGE) -> int:
    """`nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


class Slab:
    """A mapping of `PAGE + capacity` bytes. `create` in the trainer, `attach` (by file descriptor) in the writer."""

    def __init__(self, fd: int, capacity: int) -> None:
        """Map an open file descriptor, which this object then owns. `capacity` is the data area in bytes."""
        self.fd = fd
        self.capacity = capacity
        self._close_fd = weakref.finalize(self, os.close, fd)
        self._map = mmap.mmap(fd, PAGE + capacity)
        self._header = memoryview(self._map)[:_WATERMARK_BYTES].cast("Q")
        self.data = memoryview(self._map)[PAGE:]
        self._stop_prefault = threading.Event()
        self._prefault: threading.Thread | None = None

    @classmethod
    def create(cls, nbytes: int) -> Slab:
        """A new slab with room for `nbytes` of data (rounded up to whole pages)."""
        capacity = max(round_up(nbytes), PAGE)
        if hasattr(os, "memfd_create"):
            fd = os.memfd_create("spot-slab", os.MFD_CLOEXEC)
        else:
            with tempfile.TemporaryFile(prefix="spot-slab-") as file:
                fd = os.dup(file.fileno())
        os.ftruncate(fd, PAGE + capacity)
        return cls(fd, capacity)

    @property
    def watermark(self) -> int:
        """Bytes of `data`, from its start, that hold the snapshot."""
        return self._header[0]

    @watermark.setter
    def watermark(self, nbytes: int) -> None:
        self._header[0] = nbytes  # one aligned 8-byte store: the other process sees the old or the new value

    def prefault(self, nbytes: int | None = None) -> None:
        """Take the pages of the first `nbytes` of data now, in a background thread that holds no lock of Python's.

        Fresh pages make a copy several times slower, so without this the first save would pay for all of them.
        """
        if self._prefault is not None:
            return
        length = min(self.capacity if nbytes is None else round_up(nbytes), self.capacity)
        self._prefault = threading.Thread(
            target=self._populate, args=(PAGE + length,), name="spot-prefault", daemon=True
        )
        self._prefault.start()

    def wait_prefaulted(self) -> None:
        """Return when the background prefault, if one was started, is over."""
        if self._prefault is not None:
            self._prefault.join()

    def _populate(self, length: int) -> None:
        libc = ctypes.CDLL(None, use_errno=True)  # CDLL calls run without the GIL, mmap.madvise does not
        anchor = ctypes.c_char.from_buffer(self._map)
        address = ctypes.addressof(anchor)
        for start in range(0, length, _PREFAULT_STEP):
            step = min(_PREFAULT_STEP, length - start)
            if self._stop_prefault.is_set():
                return
            if libc.madvise(ctypes.c_void_p(address + start), ctypes.c_size_t(step), _MADV_POPULATE_WRITE):
                # An older kernel or another system: allocate the pages at least; mapping them is the cheaper half.
                # Without even that the first copy takes them, which is slower but right.
                if hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(self.fd, start, length - start)
                return

    def close(self) -> None:
        """Unmap and close, once nothing looks into the mapping any more (otherwise when the last view goes)."""
        self._stop_prefault.set()
        self.wait_prefaulted()
        self._header.release()
        with contextlib.suppress(BufferError):  # a tensor still views the memory: its end unmaps it
            self.data.release()
            self._map.close()
        self._close_fd()
