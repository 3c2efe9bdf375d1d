"""The writer as a thread of the trainer: for stores that no other process can open, and for debugging."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from spot_core.writer.drain import DrainJob
from spot_core.writer.gate import Gate
from spot_core.writer.job import Bases, WriteJob, encode_index, fields_of
from spot_core.writer.meter import Tell
from spot_core.writer.part import Landed
from spot_core.writer.places import Places
from spot_core.writer.slab import Slab


class ThreadBackend:
    """`on_end(job number, what was written or the error)` is called for each job, on its thread."""

    alive = True

    def __init__(self, places: Places, on_end: Callable[[int, Landed | BaseException], None], tell: Tell) -> None:
        self._places = places
        self._tell = tell
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

    def drain(self, number: int, job: DrainJob) -> None:
        threading.Thread(target=self._drain, args=(number, job), name="spot-drain", daemon=True).start()

    def ring(self) -> None:
        if self._gate is not None:
            self._gate.ring()

    def settle(self, bases: Bases) -> None:
        if self._gate is not None:
            self._gate.settle(bases)

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
            # One of this job's own, too, since it may hang like the job.
            with ThreadPoolExecutor(1, thread_name_prefix="spot-digest") as beside:
                landed = self._places.write(gate, fields_of(job), lambda: encode_index(job), self._tell, beside)
        except BaseException as error:  # noqa: BLE001 - everything is reported to the trainer, whose policy decides
            self._on_end(number, error)
        else:
            self._on_end(number, landed)

    def _drain(self, number: int, job: DrainJob) -> None:
        try:
            part = self._places.drain(job, self._tell)
        except BaseException as error:  # noqa: BLE001 - as above
            self._on_end(number, error)
        else:
            self._on_end(number, Landed(part))
