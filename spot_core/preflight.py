"""Before the first step: may this identity do at the store what a run needs, is there room, how long will a save take?

`examine_store` tries each verb on objects of its own below `probes/` and takes them away again; the other examinations
only look. Each gives `Check`s; `Report` shows them and raises what the worst one means. A place that is not empty and
not a run is never written to.
"""

from __future__ import annotations

import io
import logging
import os
import secrets
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from rich.console import Console
from rich.table import Table

from spot_core import layout
from spot_core.errors import (
    AccessError,
    ConfigError,
    KeyExistsError,
    Reason,
    SpotError,
    StoreError,
    TransientStoreError,
)
from spot_core.grants import grant
from spot_core.run import Run
from spot_core.store import BytesSource, LocalStore, Store, put_once

__all__ = [
    "STALE_S",
    "Check",
    "Level",
    "Rate",
    "Report",
    "examine_folder",
    "examine_memory",
    "examine_pace",
    "examine_space",
    "examine_store",
    "folder_of",
    "sweep",
]

_log = logging.getLogger(__name__)

LIMIT_S = 90.0
"""A store that has not answered all questions by then fails."""
SKEW_S = 60.0
STALE_S = 3600.0
"""Probes older than that, by the store's own clock, were left by a preflight that died."""
_SAMPLE_BYTES = 8 << 20
_LONG_SAMPLE_BYTES = 32 << 20
_QUICK_S = 0.1
"""When the sample took less, a longer one is sent: the start would weigh too much."""


class Level(str, Enum):
    OK = "ok"
    WARN = "warn"
    """The run can start; what it gives up is said."""
    FAIL = "FAULT"


@dataclass(frozen=True)
class Check:
    name: str
    level: Level
    detail: str
    error: SpotError | None = field(default=None, repr=False, compare=False)


@dataclass(frozen=True)
class Rate:
    """What one writer reached: bytes per second."""

    bytes_s: float


@dataclass(frozen=True)
class Report:
    uri: str
    checks: tuple[Check, ...]

    @property
    def failed(self) -> list[Check]:
        return [check for check in self.checks if check.level is Level.FAIL]

    def raise_failed(self) -> None:
        """Raises the error of the first check that failed, naming all of them: AccessError, StoreError, ConfigError."""
        failed = self.failed
        if not failed:
            return
        first = failed[0].error
        kind = type(first) if isinstance(first, (AccessError, ConfigError)) else StoreError
        told = " ".join(f"{check.name}: {check.detail}" for check in failed)
        raise kind(
            f"The preflight of {self.uri} failed; nothing was started. {told}",
            reason=None if first is None else first.reason,
            hint="`spot doctor` checks again by hand; preflight=False (SPOT_PREFLIGHT=0) starts without looking.",
        )

    def text(self) -> str:
        """The table, for a log."""
        table = Table(box=None, pad_edge=False, show_header=False)
        for check in self.checks:
            table.add_row(check.name, check.level.value, check.detail)
        out = io.StringIO()
        Console(file=out, width=240, highlight=False, markup=False, color_system=None).print(table)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def examine_store(run: Run, *, limit_s: float = LIMIT_S) -> tuple[list[Check], Rate | None]:
    """Try every verb that a run needs, and measure the rate of a write. Bounded by `limit_s` whatever the store does.

    Raises ConfigError (reason NOT_A_RUN) for a place that is not empty and not a run; nothing was written there.
    """
    examination = _Examination(run)
    # Not waited for once it is late: a store that hangs must not hold the start of the process, nor its end.
    thread = threading.Thread(target=examination.run, name="spot-preflight", daemon=True)
    thread.start()
    thread.join(limit_s)
    if examination.refused is not None:
        raise examination.refused
    checks = list(examination.checks)
    if thread.is_alive():
        late = f"{run.uri} did not answer within {limit_s:g} s (asked to {examination.doing})"
        checks.append(_failed(examination.doing, StoreError(f"{late}.", reason=Reason.TRANSIENT)))
    return checks, examination.rate


class _Examination:
    """The checks of one store, in the order in which each needs what the one before proved."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._store: Store = run.store
        self._token = secrets.token_hex(8)
        self._written: list[str] = []
        self.checks: list[Check] = []
        self.rate: Rate | None = None
        self.doing = "look"
        self.refused: Exception | None = None
        self._swept_before: float | None = None
        self._unreachable = False

    def run(self) -> None:
        try:
            self._examine()
        except Exception as error:  # noqa: BLE001 - raised again in the thread that asked
            self.refused = error

    def _examine(self) -> None:
        # What is there decides whether anything may be written at all.
        if not self._try("look", self._look):
            return
        wrote = self._try("write", self._write)
        conditional = self._try("write once", self._write_once)
        if wrote or conditional:
            self._try("read", self._read)
            self._try("list", self._list)
            self._try("clock", self._clock)
            self._try("speed", self._speed)
            self._try("delete", self._delete)

    def _try(self, name: str, check: Callable[[], Check]) -> bool:
        if self._unreachable:
            return False
        self.doing = name
        try:
            self.checks.append(check())
        except ConfigError:
            raise
        except TransientStoreError as error:
            # It was tried again for long enough; every further question would take as long.
            self._unreachable = True
            self.checks.append(_failed(name, error))
            return False
        except SpotError as error:
            self.checks.append(_failed(name, error, grant(self._store.uri, name)))
            return False
        return True

    def _look(self) -> Check:
        record = self._run.check_place()
        return Check("look", Level.OK, "a run can begin here" if record is None else f"run {record.run_id}")

    def _write(self) -> Check:
        key = self._key("a")
        self._store.put(key, self._token.encode())
        self._written.append(key)
        return Check("write", Level.OK, "objects can be put and replaced")

    def _write_once(self) -> Check:
        if not self._store.capabilities.put_if_absent:
            told = "no conditional put here: two jobs on one run are told apart by chance only"
            return Check("write once", Level.WARN, told)
        key = self._key("b")
        put_once(self._store, key, self._token.encode())
        self._written.append(key)
        try:
            self._store.put_if_absent(key, b"another")
        except KeyExistsError:
            return Check("write once", Level.OK, "a name that is taken is refused")
        raise StoreError(f"{self._store.uri} let a conditional put replace an object.", reason=Reason.CAPABILITY)

    def _read(self) -> Check:
        if self._store.get(self._written[-1]) != self._token.encode():
            raise StoreError(f"{self._written[-1]} at {self._store.uri} does not read back as it was written.")
        return Check("read", Level.OK, "what was written reads back")

    def _list(self) -> Check:
        found = {info.key for info in self._store.list(layout.PROBES)}
        if not found.issuperset(self._written):
            return Check("list", Level.WARN, "a listing lacks what was just written: others may see it late")
        return Check("list", Level.OK, "a listing shows it")

    def _clock(self) -> Check:
        now = self._run.clock.now()
        info = self._store.stat(self._written[-1])
        if info is None:
            raise StoreError(f"{self._written[-1]} at {self._store.uri} has vanished since it was written.")
        if info.modified is None:
            return Check("clock", Level.OK, "the store tells no time")
        self._swept_before = info.modified - STALE_S
        skew_s = now - info.modified
        if abs(skew_s) <= SKEW_S:
            return Check("clock", Level.OK, f"within {SKEW_S:.0f} s of the store's")
        told = f"{abs(skew_s):.0f} s {'ahead of' if skew_s > 0 else 'behind'} the store's: signed requests get refused"
        return Check("clock", Level.WARN, f"{told} at some difference, and times in the run's records mislead")

    def _speed(self) -> Check:
        size, seconds = 0, 0.0
        for name, size in (("c", _SAMPLE_BYTES), ("d", _LONG_SAMPLE_BYTES)):
            key = self._key(name)
            block = secrets.token_bytes(1 << 20)
            began = self._run.clock.monotonic()
            self._written.append(key)
            self._store.put_blob(key, BytesSource(block * (size >> 20)))
            seconds = self._run.clock.monotonic() - began
            if seconds >= _QUICK_S:
                break
        self.rate = Rate(size / max(seconds, 1e-3))
        return Check("speed", Level.OK, f"{_size(self.rate.bytes_s)}/s by one writer, measured with {_size(size)}")

    def _delete(self) -> Check:
        for key in self._written:
            self._store.delete(key)
        if self._swept_before is not None:
            sweep(self._store, self._swept_before)
        if self._store.stat(self._written[0]) is not None:
            raise StoreError(f"{self._written[0]} at {self._store.uri} is still there after it was deleted.")
        return Check("delete", Level.OK, "the probes are gone again")

    def _key(self, name: str) -> str:
        return layout.probe_key(self._token, name)


def sweep(store: Store, before: float) -> int:
    """Delete probes older than `before` (unix s of the store's clock); how many. Raises StoreError."""
    stale = [info.key for info in store.list(layout.PROBES) if info.modified is not None and info.modified < before]
    for key in stale:
        store.delete(key)
    return len(stale)


def examine_space(name: str, folder: str | os.PathLike[str], one_bytes: int, kept: int) -> Check:
    """Free space for a save of `one_bytes` in `folder` and, as a warning, for the `kept` ones that stay beside it."""
    place = next(path for path in (Path(folder).absolute(), *Path(folder).absolute().parents) if path.exists())
    free = shutil.disk_usage(place).free
    told = f"{_size(free)} free at {place}, a save takes {_size(one_bytes)}"
    if free < one_bytes:
        error = StoreError(f"{told}: not one fits.", reason=Reason.NO_SPACE)
        return Check(name, Level.FAIL, f"{told}: not one fits. Free space, or choose another place.", error)
    if free < one_bytes * (kept + 1):
        return Check(name, Level.WARN, f"{told}: room for {free // one_bytes}, and {kept} are kept beside a new one")
    return Check(name, Level.OK, told)


def examine_folder(name: str, folder: str | os.PathLike[str], one_bytes: int, kept: int) -> Check:
    """Whether this process may write to `folder`, a local tier, and then as `examine_space`."""
    store = LocalStore(Path(folder).expanduser())
    key, data = layout.probe_key(secrets.token_hex(8), "a"), secrets.token_bytes(16)
    try:
        store.put(key, data)
        found = store.get(key)
        store.delete(key)
    except StoreError as error:
        return _failed(name, error, grant(store.uri, "write"))
    if found != data:
        return _failed(name, StoreError(f"{key} at {store.uri} does not read back as it was written."))
    return examine_space(name, store.root, one_bytes, kept)


def examine_memory(needed: int, available: int, total: int) -> Check:
    """Host memory for the staging copies of all ranks of this machine, `needed` bytes in all."""
    told = f"a snapshot takes {_size(needed)} of {_size(available)} free memory"
    if needed > total:
        error = StoreError(f"{told}, {_size(total)} in all.", reason=Reason.NO_SPACE)
        what = f"{told}, {_size(total)} in all: it can never fit. Shard the state over more machines"
        return Check("memory", Level.FAIL, f"{what}, or give the job more memory.", error)
    if needed > available:
        return Check("memory", Level.WARN, f"{told}: the first save may end the process")
    return Check("memory", Level.OK, told)


def examine_pace(nbytes: int, rate: Rate, *, window_s: float, interval_s: float | None) -> Check:
    """How long `nbytes` take at `rate`, against the window of a notice and the interval of the saves (if set)."""
    durable_s = nbytes / rate.bytes_s
    told = f"about {durable_s:.1f} s for {_size(nbytes)} at {_size(rate.bytes_s)}/s"
    if interval_s is not None and durable_s > interval_s:
        holds = f"an interval of {1.1 * durable_s:.0f} s or more would hold"
        return Check("durable", Level.WARN, f"{told}: longer than the interval of {interval_s:g} s; {holds}")
    if durable_s > window_s:
        return Check("durable", Level.WARN, f"{told}: longer than the {window_s:g} s that a notice leaves for a save")
    return Check("durable", Level.OK, told)


def folder_of(store: Store) -> Path | None:
    """Where the store's bytes lie on this machine; None for stores elsewhere."""
    return store.root if isinstance(store, LocalStore) else None


def _failed(name: str, error: SpotError, advice: str = "") -> Check:
    told = f"{error.message.rstrip('.')}."
    if isinstance(error, AccessError) and advice:
        told = f"{told} {advice}"
    elif error.hint:
        told = f"{told} {error.hint}"
    return Check(name, Level.FAIL, told, error)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
