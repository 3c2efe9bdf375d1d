"""The writer as a process of its own: starting it, talking to it, noticing its death."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import queue
import signal
import socket
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Callable
from pathlib import Path

from spot_core.errors import ConfigError, SaveError
from spot_core.manifest import Part
from spot_core.writer.drain import DrainJob
from spot_core.writer.job import Bases, WriteJob, fields_of
from spot_core.writer.meter import Tell
from spot_core.writer.packing import Packer
from spot_core.writer.part import Landed
from spot_core.writer.places import Places
from spot_core.writer.serve import IGNORED_SIGNALS
from spot_core.writer.slab import Slab
from spot_core.writer.wire import Wire

logger = logging.getLogger(__name__)

_REAP_S = 5.0


class ProcessBackend:
    """A running writer process. `on_end(job number, what was written or the error)` is called for each job, on the
    reader's thread."""

    def __init__(self, places: Places, on_end: Callable[[int, Landed | BaseException], None], tell: Tell) -> None:
        """Start the process. Raises ConfigError when `storage_options` cannot travel to it, OSError from the start.

        `tell` hears of the progress of long uploads, on the reader's thread.
        """
        storage_options = places.store.storage_options
        try:
            json.dumps(dict(storage_options))
        except (TypeError, ValueError):
            names = ", ".join(sorted(map(str, storage_options)))
            raise ConfigError(
                f"storage_options ({names}) hold objects that cannot be handed to the writer process.",
                hint="Give plain values, or set writer='thread'.",
            ) from None
        self._on_end = on_end
        self._tell = tell
        self._packer = Packer()  # for the thread of the outbox alone
        self._slab: Slab | None = None
        self._given: set[int] = set()  # jobs and drains that have not ended
        self._last = 0  # job
        self._dead = threading.Event()
        ours, theirs = socket.socketpair()
        with theirs:
            self._wire = Wire(ours)
            self._process = _spawn(theirs.fileno())
        self._outbox: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name="spot-writer-replies", daemon=True)
        self._reader.start()
        # A thread that waits, not one per job: the trainer would wait for its start.
        threading.Thread(target=self._send_jobs, name="spot-writer-jobs", daemon=True).start()
        # Over the socket, not by command line or environment: others may read those.
        self._wire.send("open", **places.to_json())

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return not self._dead.is_set() and not self._wire.hung_up()

    def use(self, slab: Slab) -> None:
        """Make `slab` the one that later jobs refer to."""
        if slab is not self._slab:
            self._wire.send("slab", fd=slab.fd, capacity=slab.capacity)
            self._slab = slab

    def submit(self, number: int, job: WriteJob) -> None:
        """Raises OSError when the writer is gone."""
        self._given.add(number)
        self._last = number
        # At once, so that the writer makes the file while the snapshot begins; it needs the index at the end only.
        try:
            self._wire.send("write", job=number, **fields_of(job))
        except OSError:
            self._given.discard(number)
            raise
        self._outbox.put(lambda: self._send_index(number, job))

    def drain(self, number: int, job: DrainJob) -> None:
        self._given.add(number)
        self._outbox.put(lambda: self._send_drain(number, job))

    def ring(self) -> None:
        """Tell the writer that the watermark moved. A writer that is gone shows in its job's end, not here."""
        with contextlib.suppress(OSError):
            self._wire.send("staged")

    def settle(self, bases: Bases) -> None:
        """Tell the writer what base blobs the last job has."""
        number = self._last
        self._outbox.put(lambda: self._send_bases(number, bases))

    def abort(self, why: str) -> None:
        """Tell the writer that the last job's snapshot will never be whole."""
        number = self._last
        self._outbox.put(lambda: self._send_abort(number, why))

    def kill(self) -> None:
        """End it now, whatever it is doing; its job ends in an error."""
        self._process.kill()
        self._reader.join(_REAP_S)

    def close(self, timeout_s: float) -> None:
        """Ask it to end, kill it when it has not within `timeout_s`."""
        with contextlib.suppress(OSError):
            self._wire.send("close")
        self._reader.join(timeout_s)
        if self._reader.is_alive():
            self.kill()

    def disown(self) -> None:
        """In a forked child: let go of the socket, so that the writer sees the trainer's end."""
        self._dead.set()
        self._wire.close()

    def _send_jobs(self) -> None:
        while (send := self._outbox.get()) is not None:
            send()

    def _send_bases(self, number: int, bases: Bases) -> None:
        fields, payload = bases.to_wire()
        with contextlib.suppress(OSError):
            self._wire.send("bases", payload=payload, job=number, **fields)

    def _send_abort(self, number: int, why: str) -> None:
        with contextlib.suppress(OSError):
            self._wire.send("abort", job=number, why=why)

    def _send_index(self, number: int, job: WriteJob) -> None:
        try:
            self._wire.send("index", payload=self._packer.pack(job), job=number)
        except OSError as error:
            self._broken(number, error)
        except (TypeError, ValueError) as error:
            self._end(number, error)
            self._send_abort(number, f"its index cannot be encoded: {error}")

    def _send_drain(self, number: int, job: DrainJob) -> None:
        try:
            self._wire.send("drain", job=number, **job.to_json())
        except OSError as error:
            self._broken(number, error)

    def _broken(self, number: int, error: OSError) -> None:
        """A broken pipe says that the writer is gone, the reader says how; it may have looked before the job came."""
        self._reader.join(_REAP_S)
        if number in self._given:
            self._end(number, error)

    def _end(self, number: int, outcome: Landed | BaseException) -> None:
        self._given.discard(number)
        self._on_end(number, outcome)

    def _read(self) -> None:
        while (frame := self._wire.receive()) is not None:
            if frame.op == "done":
                digests = tuple(map(bytes.fromhex, frame.fields["base_digests"]))
                self._end(frame.fields["job"], Landed(Part.from_json(frame.fields["part"]), digests))
            elif frame.op == "progress":
                self._tell(frame.fields["done"], frame.fields["size"], frame.fields["seconds"])
            else:
                self._end(frame.fields["job"], SaveError(f"{frame.fields['error']}: {frame.fields['message']}"))
        self._dead.set()
        self._outbox.put(None)
        given, self._given = sorted(self._given), set()
        how = self._reap()
        self._wire.close()
        for number in given:
            self._on_end(number, SaveError(f"the writer process {how} in the middle of it"))

    def _reap(self) -> str:
        try:
            status = self._process.wait(_REAP_S)
        except subprocess.TimeoutExpired:
            # Its end of the socket is closed, so it is on its way out, perhaps held up by a device.
            self._process.kill()
            return "hung"
        if status < 0:
            return f"was killed by signal {-status}"
        return f"exited with status {status}; its standard error may say why"


def _spawn(fd: int) -> subprocess.Popen[bytes]:
    """Start the interpreter on `spot_core.writer` with `fd` as its end of the socket and nothing else of ours open."""
    # The kernel's "parent" of PR_SET_PDEATHSIG is the thread that starts the process.
    main_thread = threading.get_native_id() == os.getpid()
    command = [sys.executable, "-m", "spot_core.writer", str(fd), str(os.getpid()), str(int(main_thread))]
    if sys.version_info >= (3, 11):
        command.insert(1, "-P")  # the working directory may hold a file named like one of the standard library
    # Until the process ignores the signals itself it has them blocked: a mask is inherited.
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED_SIGNALS)
    try:
        return subprocess.Popen(
            command,
            pass_fds=(fd,),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env=_environment(),
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _environment() -> dict[str, str]:
    """The trainer's environment; where this package is not installed but found by path, that path with it."""
    environment = dict(os.environ)
    home = str(Path(__file__).resolve().parents[2])
    if home not in map(os.path.realpath, (sysconfig.get_path("purelib"), sysconfig.get_path("platlib"))):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), home)))
    return environment
