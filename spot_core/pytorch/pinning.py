"""The slab as tensors, and as page-locked memory for CUDA."""

from __future__ import annotations

import logging
import threading

import torch

from spot_core.writer.slab import Slab

logger = logging.getLogger(__name__)


class Pinned:
    """Views of a slab's data as tensors; `pin` page-locks it, so that copies from a device run beside everything."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(slab.data, dtype=torch.uint8)
        self._lock = threading.Lock()
        self._tried = False
        self._pinned = False

    def view(self, offset: int, nbytes: int, dtype: torch.dtype, shape: torch.Size) -> torch.Tensor:
        """A contiguous tensor over `nbytes` bytes of the data from `offset`, a multiple of the element size."""
        return self._bytes[offset : offset + nbytes].view(dtype).view(shape)

    def pin(self) -> None:
        """Page-lock the slab, once. Without the right or the room to do so, copies are slower, not wrong."""
        self.slab.wait_prefaulted()
        with self._lock:
            if self._tried:
                return
            self._tried = True
            address, size = self._bytes.data_ptr(), self.slab.capacity
            code = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
            self._pinned = code == 0
        if code:
            logger.warning(
                "Page-locking %d MiB for snapshots failed (CUDA error %d); saves will block longer. "
                "The limit of locked memory (ulimit -l) may be too low.",
                size >> 20,
                code,
            )

    def release(self) -> None:
        """Unlock the memory; it must be done before the mapping goes. No copy may be under way."""
        with self._lock:
            self._tried = True
            if self._pinned:
                self._pinned = False
                torch.cuda.cudart().cudaHostUnregister(self._bytes.data_ptr())  # type: ignore[no-untyped-call]
