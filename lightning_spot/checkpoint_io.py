"""Lightning's own checkpoints (ModelCheckpoint, `trainer.save_checkpoint`) through the same engine as the run's.

A checkpoint path becomes a small run of its own with one committed generation. Saving returns when the state is copied;
one save is in flight at a time. A file is removed only after every save asked for before is durable. Reading sees what
was written, and verifies digests.
"""

from __future__ import annotations

import atexit
import logging
import os
import weakref
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import fsspec
import torch

from lightning_spot import _compat
from spot_core.config import Settings
from spot_core.errors import ConfigError, SpotError
from spot_core.layout import RUN_RECORD
from spot_core.pytorch.loader import load
from spot_core.pytorch.session import Session
from spot_core.run import Run
from spot_core.verify import Depth

log = logging.getLogger(__name__)

_DROPPABLE = ("hyper_parameters", "datamodule_hyper_parameters")


class SpotCheckpointIO:
    """A CheckpointIO plugin: `Trainer(plugins=[SpotCheckpointIO()])`.

    Parameters
    ----------
    writer: "process" or "thread", see `spot_core.config.Settings`.
    allow_pickle: whether state that only pickle can express may be saved and loaded.
    storage_options: passed to fsspec for every path.

    Raises SaveError for a failed save at the next save, at `flush` or at the end of the fit; never silently. Not for
    FSDP and ModelParallel strategies: they write and read their checkpoints themselves (`check_strategy`).
    """

    def __init__(
        self,
        writer: str = "thread",
        allow_pickle: bool = False,
        storage_options: Mapping[str, Any] | None = None,
    ) -> None:
        _compat.register_checkpoint_io(type(self))
        self._settings = Settings(
            interval="1000000 steps",
            keep=1,
            sources="none",
            writer=writer,
            on_save_error="raise",
            allow_pickle=allow_pickle,
            preflight=False,  # each checkpoint is a run of its own, made in the middle of the training
        )
        self._storage_options = storage_options
        self._saving: tuple[str, Session] | None = None
        self._removals: list[str] = []
        self._pid = os.getpid()
        _flush_at_exit(self)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | PurePath, storage_options: Mapping[str, Any] | None = None
    ) -> None:
        """Copy the state and write it in the background. First finishes the save before it, with its error."""
        self.flush()
        where = _plain(path)
        session = Session(self._run(where, storage_options), self._settings, meta=lambda: {"checkpoint_path": where})
        session.start()
        self._saving = where, session
        step = int(checkpoint.get("global_step", 0))
        session.save(step, shared=checkpoint, local={}, droppable=_DROPPABLE, reason="checkpoint")
        if PurePath(where).name.startswith("."):
            self.flush()  # a tuner's or a launcher's: read again at once, perhaps by another process

    def load_checkpoint(
        self, path: str | PurePath, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """The checkpoint at `path`; a plain file of Lightning's own format is read too.

        Raises CorruptShardError or TornGenerationError for damage, RestoreError when the path holds no generation.
        """
        self.flush()
        where = _plain(path)
        if not self._is_run(where):
            return _load_file(where, map_location, weights_only, self._storage_options)
        run = self._run(where)
        verified = run.select(Depth.SIZES).verified
        if verified is None:
            raise ConfigError(f"{where} holds no complete checkpoint.", hint="Give the path of an earlier one.")
        state = load(run.store, verified, rank=0, world=1, allow_pickle=self._settings.allow_pickle)
        checkpoint: dict[str, Any] = state.shared
        return checkpoint

    def remove_checkpoint(self, path: str | PurePath) -> None:
        """Remove it once every save that was asked for before is durable."""
        self._removals.append(_plain(path))
        if self._saving is None:
            self.flush()

    def flush(self) -> None:
        """Wait for the save in flight, then do the removals that waited for it. Raises SaveError, StoreError.

        After a failed save nothing is removed: what was to be replaced may be the only good checkpoint.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            where, session = saving
            removals, self._removals = self._removals, []
            try:
                session.drain()
            except SpotError:
                log.error("the checkpoint %s was not written; kept for that: %s", where, ", ".join(removals) or "none")
                raise
            finally:
                session.close()
            self._removals = removals
        removals, self._removals = self._removals, []
        for path in removals:
            file_system, name = fsspec.core.url_to_fs(path, **(self._storage_options or {}))
            if file_system.exists(name):
                file_system.rm(name, recursive=True)

    def teardown(self) -> None:
        """Called by Lightning at the end of a fit, whichever way it ended."""
        if os.getpid() == self._pid:
            self.flush()

    @staticmethod
    def check_strategy(strategy: Any) -> None:
        """Raises ConfigError for a strategy that goes past its CheckpointIO."""
        if strategy.restore_checkpoint_after_setup:
            raise ConfigError(
                f"{type(strategy).__name__} writes and reads its checkpoints without asking its CheckpointIO, so "
                "SpotCheckpointIO would be ignored.",
                hint="Leave the plugin out with this strategy.",
            )

    def _run(self, where: str, storage_options: Mapping[str, Any] | None = None) -> Run:
        return Run.open(where, storage_options=storage_options or self._storage_options)

    def _is_run(self, where: str) -> bool:
        file_system, name = fsspec.core.url_to_fs(where, **(self._storage_options or {}))
        return bool(file_system.exists(f"{name.rstrip('/')}/{RUN_RECORD}"))


def _plain(path: str | PurePath) -> str:
    return os.fspath(path)


def _load_file(
    where: str, map_location: Any, weights_only: bool | None, options: Mapping[str, Any] | None
) -> dict[str, Any]:
    if weights_only is False:
        raise ConfigError(
            f"{where} is to be read with weights_only=False, which runs code from the file.",
            hint="Load it with Lightning's own TorchCheckpointIO if you trust it.",
        )
    with fsspec.open(where, "rb", **(options or {})) as file:
        loaded: dict[str, Any] = torch.load(file, map_location=map_location, weights_only=True)
    return loaded


def _flush_at_exit(plugin: SpotCheckpointIO) -> None:
    """A script that ends without a teardown still gets its last checkpoint, and its error."""
    known = weakref.ref(plugin)

    def flush() -> None:
        found = known()
        if found is not None and os.getpid() == found._pid:
            found.flush()

    atexit.register(flush)
    weakref.finalize(plugin, atexit.unregister, flush)
