"""The trainer's side of the writer: the slab, one job in flight, and a new writer when the old one died.

One save, in this order::

    slab = client.arm(size)          # room for the snapshot, watermark at 0
    future = client.submit(job)      # any thread, before or after the copy begins
    client.advance(nbytes)           # as the copy into slab.data proceeds, up to size
    part = future.result()           # durable; commit it elsewhere

A job with `base_room` needs one more word, `client.settle(bases)`, once all is staged.
"""

from __future__ import annotations

import logging
import os
import threading
import weakref
from collections.abc import Mapping
from concurrent.futures import Future
from typing import Any, Literal, TypeAlias

from spot_core.errors import ConfigError, SaveError
from spot_core.manifest import Part
from spot_core.store import Store, is_reopenable, open_store
from spot_core.tiers import LocalTier
from spot_core.writer.drain import DrainJob
from spot_core.writer.job import Bases, WriteJob
from spot_core.writer.meter import Throttle
from spot_core.writer.part import Landed
from spot_core.writer.places import Places
from spot_core.writer.process import ProcessBackend
from spot_core.writer.slab import Slab
from spot_core.writer.thread import ThreadBackend

logger = logging.getLogger(__name__)

Mode: TypeAlias = Literal["process", "thread"]

_SLACK = 64
"""A slab that must grow grows by one part in so many beyond the need: states vary by a few objects."""

_clients: weakref.WeakSet[WriterClient] = weakref.WeakSet()
_fork_hook_set = False


class WriterClient:
    """Hands snapshots to a writer. Thread safe; at most one job is in flight. Make one with `start`."""

    def __init__(self, places: Places, mode: Mode) -> None:
        self._places = places
        self._store = places.store
        self._mode = mode
        self._lock = threading.RLock()
        self._backend: ProcessBackend | ThreadBackend | None = None
        self._slab: Slab | None = None
        self._number = 0  # counts jobs and drains
        self._job_number = 0  # of the last job
        self._armed = False
        self._job: WriteJob | None = None
        self._future: Future[Part] | None = None
        self._drains: dict[int, tuple[DrainJob, Future[Part]]] = {}
        self._staging_failure: str | None = None
        self._bases: Bases | None = None
        self.base_digests: tuple[str, tuple[bytes, ...]] = ("", ())
        """Key and chunk digests of the base blob that was written last."""
        self._closed = False

    @classmethod
    def start(
        cls,
        store: Store | str,
        storage_options: Mapping[str, Any] | None = None,
        *,
        mode: Mode = "process",
        local: LocalTier | None = None,
        bytes_s: float | None = None,
    ) -> WriterClient:
        """Start a writer for `store` (or for its URI and options), and for the `local` tier in front of it.

        `bytes_s` bounds the rate at which it writes to `store`.

        A store that no other process can open gets a thread whatever `mode` says. In thread mode a `Store` object is
        used as it is; a process opens its URI again.

        Raises ConfigError for an unknown mode, or options that cannot travel to a process.
        """
        if mode not in ("process", "thread"):
            raise ConfigError(f"Unknown writer mode {mode!r}.", hint="Use 'process' or 'thread'.")
        opened = open_store(store, storage_options=storage_options) if isinstance(store, str) else store
        places = Places(opened, local, Throttle(bytes_s))
        client = cls(places, mode if is_reopenable(opened) else "thread")
        with client._lock:
            client._running_backend()
        _clients.add(client)
        _set_fork_hook()
        return client

    @property
    def mode(self) -> Mode:
        return self._mode

    @property
    def pid(self) -> int | None:
        """Process id of the running writer (this process's own in thread mode)."""
        with self._lock:
            return None if self._backend is None else self._backend.pid

    @property
    def slab(self) -> Slab | None:
        """The current slab; replaced when a snapshot needs more room."""
        return self._slab

    @property
    def busy(self) -> bool:
        """True while a job is in flight."""
        with self._lock:
            return self._future is not None

    def reserve(self, nbytes: int) -> None:
        """Make room for a snapshot of `nbytes` and take its memory in the background, so that the first save need not.

        Call it as early as the size is known, with the size of the whole state (optimizer included, also when its
        tensors do not exist yet). Has no effect while a job is in flight. Raises SaveError when it cannot be had.
        """
        with self._lock:
            self._check_open()
            if self._future is None:
                self._ensure_slab(nbytes)

    def arm(self, nbytes: int) -> Slab:
        """The slab with room for `nbytes` and its watermark at 0. From here on its data may be overwritten.

        Raises SaveError when the job before is still in flight, or no writer could be started.
        """
        with self._lock:
            self._check_open()
            if self._future is not None:
                raise SaveError(
                    self._describe("The snapshot cannot be taken: the save before it is still being written")
                )
            slab = self._ensure_slab(nbytes)
            slab.watermark = 0
            self._staging_failure = self._bases = None
            self._armed = True
            return slab

    def submit(self, job: WriteJob) -> Future[Part]:
        """Give the armed slab to the writer, which follows the watermark. The future fails with SaveError.

        The job's index is encoded behind the caller's back, so it must not be changed any more. Raises SaveError
        without `arm` before it.
        """
        with self._lock:
            self._check_open()
            if not self._armed or self._slab is None:
                raise SaveError("submit needs a slab armed for this snapshot: call arm (or Stager.stage) before it.")
            self._armed = False
            self._number += 1
            self._job = job
            self._job_number = self._number
            number, future = self._number, Future[Part]()
            future.set_running_or_notify_cancel()  # not cancellable: the writer has it
            self._future = future
            failure = self._staging_failure and f"the snapshot could not be taken: {self._staging_failure}"
            if failure is None:
                try:
                    backend = self._running_backend()
                    backend.use(self._slab)
                    backend.submit(number, job)
                    if self._bases is not None:
                        backend.settle(self._bases)
                except OSError as error:
                    failure = f"the writer could not be reached: {error}"
        if failure is not None:
            self._end(number, SaveError(failure))
        return future

    def submit_again(self, job: WriteJob) -> Future[Part]:
        """Write the snapshot that the last job was about to another place; nothing may have been armed since."""
        with self._lock:
            self._check_open()
            if self._future is not None or self._staging_failure is not None:
                raise SaveError(self._describe("The snapshot is not there any more"))
            self._armed = True
        return self.submit(job)

    def drain(self, job: DrainJob) -> Future[Part]:
        """Bring a part from the local tier to the store, beside whatever is written meanwhile."""
        future = Future[Part]()
        future.set_running_or_notify_cancel()
        with self._lock:
            self._check_open()
            self._number += 1
            number = self._number
            self._drains[number] = (job, future)
            try:
                self._running_backend().drain(number, job)
                return future
            except OSError as error:
                failure = SaveError(f"the writer could not be reached: {error}")
        self._end(number, failure)
        return future

    def advance(self, nbytes: int) -> None:
        """The first `nbytes` of the slab's data hold the snapshot now."""
        slab, backend = self._slab, self._backend
        if slab is not None and backend is not None:
            slab.watermark = nbytes
            backend.ring()

    def settle(self, bases: Bases) -> None:
        """What base blobs the armed snapshot has; all of it is staged."""
        with self._lock:
            self._bases = bases
            if not self._armed and self._future is not None and self._backend is not None:
                self._backend.settle(bases)

    def fail_staging(self, why: str) -> None:
        """The snapshot will never be complete: the job, submitted or not, ends with SaveError."""
        with self._lock:
            self._staging_failure = why
            if self._backend is not None:
                self._backend.abort(why)

    def abandon(self) -> None:
        """Give up the job in flight: its writer process is killed and its future fails. Never commits, never raises."""
        with self._lock:
            number, backend = self._job_number, self._backend
            if self._mode == "thread" and self._future is not None:
                self._slab = None  # the thread goes on reading it, so the next snapshot needs another
        if backend is not None:
            backend.kill()
        self._end(number, SaveError("it was given up"))

    def close(self, timeout_s: float = 10.0) -> None:
        """End the writer and release the slab; idempotent. A job in flight fails: drain it before."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            backend, self._backend = self._backend, None
            slab, self._slab = self._slab, None
            number, busy = self._job_number, self._future is not None
            drains = list(self._drains)
        _clients.discard(self)
        if backend is not None:
            backend.close(0.0 if busy or drains else timeout_s)
        for ended in (number, *drains):
            self._end(ended, SaveError("the writer was closed"))
        # A thread that is still writing looks into the slab: then its memory goes with the thread.
        if slab is not None and not (busy and self._mode == "thread"):
            slab.close()

    def _running_backend(self) -> ProcessBackend | ThreadBackend:
        if self._backend is None or not self._backend.alive:
            if self._mode == "thread":
                self._backend = ThreadBackend(self._places, self._end, self._progress)
            else:
                if self._backend is not None:
                    logger.warning("The writer process is gone; starting another.")
                self._backend = ProcessBackend(self._places, self._end, self._progress)
        return self._backend

    def _ensure_slab(self, nbytes: int) -> Slab:
        try:
            if self._slab is None or self._slab.capacity < nbytes:
                old, self._slab = self._slab, Slab.create(nbytes + nbytes // _SLACK)
                if old is not None:
                    old.close()
                self._slab.prefault()
            self._running_backend().use(self._slab)
        except OSError as error:
            raise SaveError(
                f"No writer with {nbytes >> 20} MiB of shared memory could be had: {error}. Nothing was written."
            ) from error
        return self._slab

    def _end(self, number: int, outcome: Landed | BaseException) -> None:
        error: BaseException | None = None
        with self._lock:
            if number in self._drains:
                job, future = self._drains.pop(number)
                if isinstance(outcome, BaseException):
                    error = _drain_error(job, outcome)
            elif self._future is None or number != self._job_number:
                return
            else:
                future, self._future = self._future, None
                error = self._as_save_error(outcome) if isinstance(outcome, BaseException) else None
        # Outside the lock: callbacks of the future run here.
        if isinstance(outcome, Landed):
            if outcome.base_digests:
                self.base_digests = (outcome.part.bases[-1].key, outcome.base_digests)
            future.set_result(outcome.part)
        else:
            future.set_exception(error)

    def _progress(self, done: int, size: int, seconds: float) -> None:
        if self._job is not None and self._job.rank != 0:
            return  # one rank's word stands for all
        rate = done / max(seconds, 1e-3)
        logger.info(
            "spot: %d of %d MB are on their way to %s after %.0f s (%.0f MB/s, about %.0f s left)",
            done // 1_000_000,
            size // 1_000_000,
            self._store.uri,
            seconds,
            rate / 1e6,
            (size - done) / max(rate, 1.0),
        )

    def _as_save_error(self, error: BaseException) -> SaveError:
        save_error = SaveError(
            f"{self._describe('Writing failed')}: {str(error).rstrip('.')}. Nothing of it was committed."
        )
        if not isinstance(error, SaveError):
            save_error.__cause__ = error
        return save_error

    def _describe(self, what: str) -> str:
        if self._job is None:
            return what
        return f"{what} (rank {self._job.rank}, {self._job.target.blob_key} at {self._store.uri})"

    def _check_open(self) -> None:
        if self._closed:
            raise SaveError("The writer is closed; no save can start.")

    def _disown(self) -> None:
        if self._backend is not None:
            self._backend.disown()
        self._closed = True


def _drain_error(job: DrainJob, error: BaseException) -> SaveError:
    told = SaveError(f"The part of rank {job.part.rank} could not be drained ({job.part.index.key}): {error}")
    if not isinstance(error, SaveError):
        told.__cause__ = error
    return told


def _set_fork_hook() -> None:
    """A forked child (a data loader worker) must not hold the socket open: the writer would outlive the trainer."""
    global _fork_hook_set
    if not _fork_hook_set:
        _fork_hook_set = True
        os.register_at_fork(after_in_child=_disown_all)


def _disown_all() -> None:
    for client in list(_clients):
        client._disown()
    _clients.clear()
