"""The writer process: takes jobs from its trainer, writes parts, and is gone as soon as the trainer is.

It loads no torch, commits nothing, and ignores the signals that ask a trainer to stop: a save in flight is what such a
signal waits for. Its life hangs on the trainer's alone, by three ropes: end-of-file on the socket; the trainer's pidfd
(the socket's other end may be held open by a forked data loader worker); PR_SET_PDEATHSIG, when the trainer's main
thread started it (the kernel means the *thread* that did).
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import select
import signal
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

from spot_core.errors import SaveError
from spot_core.store import LocalStore, open_store
from spot_core.tiers import LocalTier
from spot_core.writer.drain import DrainJob
from spot_core.writer.gate import Gate
from spot_core.writer.job import Bases
from spot_core.writer.meter import Throttle
from spot_core.writer.packing import Unpacker
from spot_core.writer.places import Places
from spot_core.writer.slab import Slab
from spot_core.writer.wire import Frame, Wire

logger = logging.getLogger(__name__)

IGNORED_SIGNALS = tuple(
    getattr(signal, name)
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGTTOU")
    if hasattr(signal, name)
)
"""Sent to whole process groups or control groups by schedulers; the trainer acts on them, the writer must not. SIGTTOU
meets a process group in the background that writes to its terminal."""

_NICENESS = 10
"""Added to the trainer's for whatever takes a core for a while: digests, the index, an upload."""

_PR_SET_PDEATHSIG = 1
_PARENT_POLL_MS = 1000  # only where there is no pidfd


class _Server:
    """Reads frames on the calling thread; jobs run one at a time on another, so that bells ring while one writes."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._jobs = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spot-write")
        # Beside them: the next snapshot is written to the local tier while the one before is still drained.
        self._drains = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spot-drain")
        # Writes to a disk need a core for moments only, but at once: their threads are as nice as the trainer, or each
        # would wait for the training's turn to end.
        self._step_back = partial(_step_back, os.getpriority(os.PRIO_PROCESS, 0))
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="spot-digest", initializer=self._step_back)
        self._unpacker = Unpacker()
        self._where: Frame | None = None
        self._places: Places | None = None
        self._opening = threading.Lock()
        self._slab: Slab | None = None
        self._gate: Gate | None = None
        self._job = 0  # that the gate is for

    def handle(self, frame: Frame) -> bool:
        """Act on one frame; False when the trainer asked for the end."""
        if frame.op == "staged":
            if self._gate is not None:
                self._gate.ring()
        elif frame.op in ("index", "bases", "abort"):
            self._tell_gate(frame)
        elif frame.op == "write":
            self._start(frame)
        elif frame.op == "drain":
            self._drains.submit(self._drain, frame)
        elif frame.op == "slab":
            self._attach(frame)
        elif frame.op == "open":
            self._where = frame
            if frame.fields["uploads"]:
                self._step_back()  # with all threads that this one starts from here on
            self._jobs.submit(self._warm_up)
        return frame.op != "close"

    def _tell_gate(self, frame: Frame) -> None:
        # Taken also when its job is over: later ones refer to what it brings.
        encode = self._unpacker.take(frame.payload) if frame.op == "index" else None
        if self._gate is None or frame.fields["job"] != self._job:
            return  # that job has failed, and the next one is here already
        if encode is not None:
            self._gate.describe(encode)
        elif frame.op == "bases":
            self._gate.settle(Bases.from_wire(frame.fields, frame.payload))
        else:
            self._gate.abort(frame.fields["why"])

    def _attach(self, frame: Frame) -> None:
        if frame.fd is None:
            raise ValueError("a slab frame came without its file descriptor")
        if self._slab is not None:
            self._slab.close()
        self._slab = Slab(frame.fd, frame.fields["capacity"])
        self._slab.prefault()

    def _warm_up(self) -> None:
        try:
            self._open_places()
        except Exception as error:  # noqa: BLE001 - the job that needs the store meets it again and reports it
            logger.debug("opening the store ahead of the first job failed: %s", error)

    def _open_places(self) -> Places:
        with self._opening:
            if self._places is None:
                if self._where is None:
                    raise SaveError("the writer was given a job before a store")
                fields = self._where.fields
                store = open_store(fields["uri"], storage_options=fields["storage_options"] or None)
                local = None
                if fields["local"] is not None:
                    local = LocalTier(LocalStore(fields["local"]["root"]), fields["local"]["run_id"])
                self._places = Places(store, local, Throttle(fields["bytes_s"]))
            return self._places

    def _start(self, frame: Frame) -> None:
        if self._slab is None:
            raise ValueError("a job came before its slab")
        self._gate, self._job = Gate(self._slab), frame.fields["job"]
        self._jobs.submit(self._write, frame, self._gate)

    def _write(self, frame: Frame, gate: Gate) -> None:
        job = frame.fields
        try:
            landed = self._open_places().write(gate, job, gate.wait_described, self._tell, self._beside)
        except BaseException as error:  # noqa: BLE001 - everything is reported to the trainer, whose policy decides
            self._failed(job["job"], error)
        else:
            digests = [digest.hex() for digest in landed.base_digests]
            self._wire.send("done", job=job["job"], part=landed.part.to_json(), base_digests=digests)

    def _drain(self, frame: Frame) -> None:
        number = frame.fields["job"]
        try:
            part = self._open_places().drain(DrainJob.from_json(frame.fields), self._tell)
        except BaseException as error:  # noqa: BLE001 - as above
            self._failed(number, error)
        else:
            self._wire.send("done", job=number, part=part.to_json(), base_digests=[])

    def _failed(self, number: int, error: BaseException) -> None:
        self._wire.send("failed", job=number, error=type(error).__name__, message=str(error))

    def _tell(self, done: int, size: int, seconds: float) -> None:
        self._wire.send("progress", done=done, size=size, seconds=seconds)


def main(argv: list[str]) -> NoReturn:
    """Serve until the trainer asks for the end or is gone."""
    fd, parent, main_thread = int(argv[0]), int(argv[1]), argv[2] == "1"
    # A process group of its own keeps away what a terminal or launcher sends to the trainer's. Not a session: where the
    # kernel shares the cores between sessions first (sched_autogroup), niceness would not count against the trainer.
    os.setpgid(0, 0)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED_SIGNALS)  # blocked by the trainer while this process started
    if main_thread and hasattr(ctypes, "CDLL"):
        _die_with_parent()
    pidfd = _open_pidfd(parent)
    if os.getppid() != parent:
        os._exit(1)  # it went before the ropes were tied
    threading.current_thread().name = "spot-writer"
    _serve(Wire(socket.socket(fileno=fd)), pidfd, parent)


def _serve(wire: Wire, pidfd: int | None, parent: int) -> NoReturn:
    server = _Server(wire)
    poll = select.poll()
    poll.register(wire.fileno(), select.POLLIN)
    if pidfd is not None:
        poll.register(pidfd, select.POLLIN)
    while True:
        ready = [fd for fd, _ in poll.poll(None if pidfd is not None else _PARENT_POLL_MS)]
        if pidfd in ready or os.getppid() != parent:
            break
        if wire.fileno() in ready:
            frame = wire.receive()
            if frame is None or not server.handle(frame):
                break
    # Not sys.exit: that would wait for a write in flight, on behalf of a trainer that is gone.
    os._exit(0)


def _step_back(niceness: int) -> None:
    """Leave the cores to the training, whose niceness is given, where both want them: the calling thread (on Linux)."""
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, min(niceness + _NICENESS, 19))


def _die_with_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):  # not Linux: the socket and the parent's pid remain
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _open_pidfd(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
