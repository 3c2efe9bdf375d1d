"""The core of spot tolerance: the commit protocol, notices, interval and policy. Needs no torch.

`PROTOCOL.md` beside this file is the normative text. Importing has no effect.
"""

from __future__ import annotations

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.config import Settings
from spot_core.errors import (
    AccessError,
    CommitError,
    ConfigError,
    CorruptShardError,
    DeadlineError,
    FencedError,
    FormatError,
    KeyExistsError,
    KeyMissingError,
    NoGenerationError,
    Reason,
    RestoreError,
    ResumeMismatchError,
    SaveError,
    SpotError,
    StoreError,
    TopologyError,
    TornGenerationError,
    TransientStoreError,
)
from spot_core.generation import Committed, Open, Written
from spot_core.layout import GenerationId, PartTarget
from spot_core.manifest import Manifest, ObjectRef, Part
from spot_core.prune import Pruned
from spot_core.record import RunRecord
from spot_core.restore import Discovery, Problem, ProblemKind, Selection
from spot_core.retention import Retention
from spot_core.run import Run, Writer
from spot_core.verify import Depth, Verified

__all__ = [
    "SYSTEM_CLOCK",
    "AccessError",
    "Clock",
    "CommitError",
    "Committed",
    "ConfigError",
    "CorruptShardError",
    "DeadlineError",
    "Depth",
    "Discovery",
    "FencedError",
    "FormatError",
    "GenerationId",
    "KeyExistsError",
    "KeyMissingError",
    "Manifest",
    "NoGenerationError",
    "ObjectRef",
    "Open",
    "Part",
    "PartTarget",
    "Problem",
    "ProblemKind",
    "Pruned",
    "Reason",
    "RestoreError",
    "ResumeMismatchError",
    "Retention",
    "Run",
    "RunRecord",
    "SaveError",
    "Selection",
    "Settings",
    "SpotError",
    "StoreError",
    "TopologyError",
    "TornGenerationError",
    "TransientStoreError",
    "Verified",
    "Writer",
    "Written",
]
