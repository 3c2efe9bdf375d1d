"""The ways to save that are compared, each behind the same four calls.

`durable` tells the end of the newest save, in `time.perf_counter` seconds, taken when its write completes and not when
the training looks; stock writers that never sync are said to be durable when their write call returns.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from spot_core.config import Settings
from spot_core.pytorch.session import Session
from spot_core.run import Run

State = dict[str, Any]
TOO_LONG_S = 600


class Contestant(Protocol):
    synced: bool
    """Whether the bytes are on the disk when it says so."""

    def save(self, state: State, folder: Path) -> None:
        """Begin (or do) a save into `folder`, which does not exist."""

    def before_update(self) -> None:
        """Called before the optimizer changes anything."""

    def ended(self) -> float | None:
        """When the newest save was complete; None while it is not. Raises when it failed."""

    def close(self) -> None: ...


class _Synchronous:
    def __init__(self, write: Callable[[State, Path], None], synced: bool) -> None:
        self.synced = synced
        self._write = write
        self._ended = 0.0

    def save(self, state: State, folder: Path) -> None:
        self._write(state, folder)
        self._ended = time.perf_counter()

    def before_update(self) -> None:
        return

    def ended(self) -> float | None:
        return self._ended

    def close(self) -> None:
        return


def torch_save(_: Any) -> Contestant:
    def write(state: State, folder: Path) -> None:
        folder.mkdir()
        with (folder / "state.pt").open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())

    return _Synchronous(write, synced=True)


def dcp_save(_: Any) -> Contestant:
    return _Synchronous(lambda state, folder: dcp.save(state, checkpoint_id=folder, no_dist=True), synced=True)


def lightning_sync(_: Any) -> Contestant:
    from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO

    io = TorchCheckpointIO()
    return _Synchronous(lambda state, folder: io.save_checkpoint(state, folder / "state.ckpt"), synced=False)


class LightningAsync:
    synced = False

    def __init__(self, _: Any) -> None:
        from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
        from lightning.pytorch.plugins.io import AsyncCheckpointIO

        ended = self._ended = threading.Event()
        outer = self

        class Timed(TorchCheckpointIO):
            def save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
                super().save_checkpoint(*args, **kwargs)
                outer._at = time.perf_counter()
                ended.set()

        self._at = 0.0
        self._io = AsyncCheckpointIO(Timed())

    def save(self, state: State, folder: Path) -> None:
        self._ended.clear()
        self._io.save_checkpoint(state, folder / "state.ckpt")

    def before_update(self) -> None:
        return

    def ended(self) -> float | None:
        return self._at if self._ended.is_set() else None

    def close(self) -> None:
        self._io.teardown()


class DcpAsync:
    """`dcp.async_save`: by a thread or a process, with its stager per save (default) or a kept one that stages in the
    background and is awaited before the optimizer, the best that the stock parts give."""

    synced = True

    def __init__(self, process: bool, cached: bool) -> None:
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        self._options: dict[str, Any] = {}
        self._stager = None
        if cached:
            options = StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=process,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
            self._stager = self._options["async_stager"] = DefaultStager(options)
        if process:
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
            dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
            self._options["async_checkpointer_type"] = AsyncCheckpointerType.PROCESS
        else:
            self._options["no_dist"] = True
        self._process = process
        self._staging: Any = None
        self._upload: Any = None
        self._at: float | None = None

    def save(self, state: State, folder: Path) -> None:
        self._at = None
        answer = dcp.async_save(state, checkpoint_id=folder, **self._options)
        self._staging = getattr(answer, "staging_completion", None)
        self._upload = getattr(answer, "upload_completion", answer)
        self._upload.add_done_callback(self._note)

    def _note(self, _: Any) -> None:
        self._at = time.perf_counter()

    def before_update(self) -> None:
        if self._staging is not None:
            self._staging.result()
            self._staging = None

    def ended(self) -> float | None:
        if self._upload.done():
            self._upload.result()
            return self._at
        return None

    def close(self) -> None:
        if self._stager is not None:
            self._stager.close()
        if self._process:
            dist.destroy_process_group()


class _Committed(logging.Handler):
    """Notes when the session logs a commit: the marker and the pointer are durable then."""

    at: float | None = None

    def emit(self, record: logging.LogRecord) -> None:
        if "committed in" in record.msg:
            self.at = time.perf_counter()


class Spot:
    """This package's session, one rank."""

    synced = True

    def __init__(self, training: Any, mode: str) -> None:
        self._training = training
        self._mode = mode
        self._step = 0
        self._began = 0.0
        self._committed = _Committed()
        self._session: Session

    def start(self, folder: Path, nbytes: int) -> None:
        """Before the first step, as a run starts: claim the life, start the writer, take the memory."""
        log = logging.getLogger("spot_core.pytorch.committer")
        log.addHandler(self._committed)
        log.setLevel(logging.INFO)
        log.propagate = False
        settings = Settings(writer=self._mode, keep=1, sources="none", on_save_error="raise", max_failed_saves=0)
        self._session = Session(Run.open(folder), settings)
        self._session.resume()
        self._session.start(state_bytes=nbytes)

    def save(self, state: State, folder: Path) -> None:
        self._committed.at = None
        self._step += 1
        self._began = time.perf_counter()
        self._session.save(self._step, shared=state, local={}, stable=self._training.stable(), reason="bench")

    def before_update(self) -> None:
        if self._session.untried:  # the adapters do it after the first step
            self._session.rehearse(shared=self._training.state(), local={}, stable=self._training.stable())
        self._session.wait_staged()

    def ended(self) -> float | None:
        if self._committed.at is None and time.perf_counter() - self._began > TOO_LONG_S:
            self._session.drain()
            raise TimeoutError("the save did not end")
        return self._committed.at

    def close(self) -> None:
        self._session.drain()
        self._session.close()


CONTESTANTS: dict[str, Callable[[Any], Any]] = {
    "torch.save + fsync": torch_save,
    "Lightning TorchCheckpointIO": lightning_sync,
    "Lightning AsyncCheckpointIO": LightningAsync,
    "dcp.save": dcp_save,
    "dcp.async_save": lambda training: DcpAsync(process=False, cached=False),
    "dcp.async_save cached": lambda training: DcpAsync(process=False, cached=True),
    "dcp.async_save process": lambda training: DcpAsync(process=True, cached=False),
    "dcp.async_save process cached": lambda training: DcpAsync(process=True, cached=True),
    "spot": lambda training: Spot(training, "process"),
    "spot (thread)": lambda training: Spot(training, "thread"),
}

SPOT = "spot"
STOCK_ASYNC = tuple(name for name in CONTESTANTS if "sync_save" in name or "AsyncCheckpointIO" in name)
