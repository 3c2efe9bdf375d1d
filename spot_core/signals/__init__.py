"""Notices: where they come from, and the watcher that joins them.

    watcher = Watcher(sources("auto"))
    watcher.start()            # in the main thread, where signals can be taken
    ...
    if watcher.arrived.is_set():
        deadline = watcher.deadline()

Third parties add sources under the entry point group ``spot_core.sources``: a `Plugin` that makes objects with the
methods of `Source` (deriving from `BaseSource` gives back-off and state for free).
"""

from __future__ import annotations

from spot_core.signals.base import BaseSource, LookFailed, Source, SupportsAck
from spot_core.signals.context import Context, Plugin
from spot_core.signals.detect import accepted, parse, sources
from spot_core.signals.flag_file import FlagFile, write_flag
from spot_core.signals.kubernetes import write_termination_log
from spot_core.signals.notice import Notice, NoticeKind
from spot_core.signals.posix_signals import PosixSignals
from spot_core.signals.slurm import requeue
from spot_core.signals.watcher import Watcher

__all__ = [
    "BaseSource",
    "Context",
    "FlagFile",
    "LookFailed",
    "Notice",
    "NoticeKind",
    "Plugin",
    "PosixSignals",
    "Source",
    "SupportsAck",
    "Watcher",
    "accepted",
    "parse",
    "requeue",
    "sources",
    "write_flag",
    "write_termination_log",
]
