"""accelerate shards models on accelerators only. Importing this lets it shard on a CPU, as torch can."""

from __future__ import annotations

import functools

from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DistributedType

_original = AcceleratorState.__init__


@functools.wraps(_original)
def _init(self, *args, fsdp_plugin=None, **kwargs):
    _original(self, *args, fsdp_plugin=fsdp_plugin, **kwargs)
    if fsdp_plugin is not None and self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.FSDP
        self.fsdp_plugin = fsdp_plugin
        PartialState._shared_state["distributed_type"] = DistributedType.FSDP


AcceleratorState.__init__ = _init
