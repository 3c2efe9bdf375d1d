"""The slab as tensors, and as page-locked memory for CUDA."""

from __future__ import annotations

import logging
import threading

import torch

from spot_core.writer.slab import Slab

logger = logging.getLogger(__name__)

_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for every context


class Pinned:
    """Views of a slab's data as tensors; `pin` page-locks it, so that copies from a device run beside everything."""

    def __init__(self, slab: Slab) -> None:
        self.slab = slab
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(slab.data, dtype=torch.uint8)
        self._typed: dict[torch.dtype, torch.Tensor] = {}
        self._views: dict[tuple[int, torch.dtype, torch.Size], torch.Tensor] = {}
        self._lock = threading.Lock()
        self._tried = False
        self._pinned = False

    def like(self, tensor: torch.Tensor, offset: int) -> torch.Tensor:
        """A contiguous tensor over the data from byte `offset`, with the shape and dtype of `tensor`.

        `offset` is a multiple of the element size. Views are kept: a state of many small tensors costs some 3 us of
        Python each to slice, at the first snapshot only.
        """
        dtype, shape = tensor.dtype, tensor.shape
        found = self._views.get((offset, dtype, shape))
        if found is None:
            if dtype not in self._typed:
                self._typed[dtype] = self._bytes.view(dtype)
            strides = tensor.stride() if tensor.is_contiguous() else _contiguous_strides(shape)
            found = self._typed[dtype].as_strided(shape, strides, offset // dtype.itemsize)
            self._views[offset, dtype, shape] = found
        return found

    def trim(self, count: int) -> None:
        """Forget the views of past layouts when there are many more than the `count` that a snapshot needs."""
        if len(self._views) > 2 * count:
            self._views.clear()

    def pin(self, device: torch.device) -> None:
        """Page-lock the slab, once, for all devices; without the right or room to do so, copies are slower, not wrong.

        Done in the context of `device`: a thread's default one is device 0, where this rank may have no business.
        """
        self.slab.wait_prefaulted()
        with self._lock:
            if self._tried:
                return
            self._tried = True
            address, size = self._bytes.data_ptr(), self.slab.capacity
            with torch.cuda.device(device):
                cudart = torch.cuda.cudart()  # type: ignore[no-untyped-call]
                code = int(cudart.cudaHostRegister(address, size, _PORTABLE))
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


def _contiguous_strides(shape: torch.Size) -> list[int]:
    strides, step = [0] * len(shape), 1
    for axis in reversed(range(len(shape))):
        strides[axis] = step
        step *= shape[axis]
    return strides
