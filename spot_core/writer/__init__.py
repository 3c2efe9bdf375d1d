"""Writing a rank's part of a save beside the training: shared memory, a writer that follows it, durable objects.

The trainer copies its state into a slab of shared memory; a writer, by default a small process without torch, digests
and stores it while the copy is still going on. The writer never commits: it reports a `Part`, and dies with its
trainer. Torch-free; the copy out of tensors is `spot_core.pytorch.stage`.
"""

from __future__ import annotations

from spot_core.writer.client import Mode, WriterClient
from spot_core.writer.drain import DrainJob
from spot_core.writer.job import Bases, RawJson, WriteJob

__all__ = ["Bases", "DrainJob", "Mode", "RawJson", "WriteJob", "WriterClient"]
