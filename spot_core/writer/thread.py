"""The writer as a thread of the trainer: for stores that no other process can open, and for debugging."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from spot_core.manifest import Part
from spot_core.store import Store
from spot_core.writer.job import WriteJob, encode_index
from spot_core.writer.part import Gate, write_staged_part
from spot_core.writer.slab import Slab


class ThreadBackend:
    """`on_end(job number, Part or error)` is called for each job, on its thread."""

    alive = True

    def __init__(self, store: Store, on_end: Callable[[int, Part | BaseException], None]) -> None:
        self._store = store
        self._on_end = on_end
        self._slab: Slab | None = None
        self._gate: Gate | None = None
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._hire()

    @property
    def pid(self) -> int:
        return os.getpid()

    def use(self, slab: Slab) -> None:
        self._slab = slab

    def submit(self, number: int, job: WriteJob) -> None:
        if self._slab is None:
            raise ValueError("a job came before its slab")
        gate = self._gate = Gate(self._slab)
        self._work.put(lambda: self._write(gate, number, job))

    def _hire(self) -> None:
        # One thread per job, since one may hang; that of the next job waits already: the trainer would stand still for
        # its start. A daemon: an interpreter that ends does not wait for a store; nothing is committed from here.
        threading.Thread(target=self._serve, name="spot-write", daemon=True).start()

    def _serve(self) -> None:
        if (write := self._work.get()) is not None:
            self._hire()
            write()

    def ring(self) -> None:
        if self._gate is not None:
            self._gate.ring()

    def abort(self, why: str) -> None:
        if self._gate is not None:
            self._gate.abort(why)

    def kill(self) -> None:
        """A thread cannot be ended from outside; it fails at its next wait for the snapshot, if it has one."""
        self.abort("given up")

    def close(self, timeout_s: float) -> None:
        self.kill()
        self._work.put(None)

    def disown(self) -> None:
        self._gate = None

    def _write(self, gate: Gate, number: int, job: WriteJob) -> None:
        try:
            part = write_staged_part(
                self._store,
                gate,
                rank=job.rank,
                blob_key=job.target.blob_key,
                index_key=job.target.index_key,
                size=job.size,
                index=encode_index(job),
            )
        except BaseException as error:  # noqa: BLE001 - everything is reported to the trainer, whose policy decides
            self._on_end(number, error)
        else:
            self._on_end(number, part)
