"""DataLoader workers that outlive a signal meant for the trainer.

A launcher sends SIGTERM to the whole process group, Slurm to every process of the step. A worker's default is to die,
and a trainer whose worker died cannot finish its save. Protected workers take no notice of such signals.

torch ends a stuck worker with SIGTERM too, so that way has to stay open: protected workers are ended over a pipe, and
killed if they do not listen. All of it goes through what DataLoader offers in public: ``worker_init_fn`` and
``multiprocessing_context``.
"""

from __future__ import annotations

import atexit
import logging
import multiprocessing
import multiprocessing.context as contexts
import os
import signal
import threading
import weakref
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from spot_core.errors import SpotError

if TYPE_CHECKING:
    from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)

Loader = TypeVar("Loader", bound="DataLoader[Any]")

IGNORED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
"""What launchers and schedulers send as a notice. SIGINT is left alone: Ctrl-C is meant for everybody."""
LISTEN_S = 2.0
FORKS, FORKED_S = 3, 15.0
"""How often a worker is forked at most, and how long until it has to run."""

# Workers that this process started and that may still run when it ends.
_started: weakref.WeakSet[_Immune] = weakref.WeakSet()
_owner = -1


def protect(loader: Loader) -> Loader:
    """Make the workers that ``loader`` starts from now on immune; returns ``loader``. Idempotent.

    Call it before the first iteration, and after a trainer has put its own ``worker_init_fn`` in place: it still
    runs. A loader without workers is left as it is, and so, with a warning, is one whose multiprocessing context is
    not one of the standard library's.

    A fork server has to outlive the signals as well, or its workers see their parent die. It does if a protected loader
    is the first to start it; other processes of that server are then born with these signals blocked, too.
    """
    if getattr(loader, "num_workers", 0) < 1:
        return loader
    context = loader.multiprocessing_context
    if isinstance(context, _CONTEXT_TYPES):
        method = None
    else:
        method = context.get_start_method() if context is not None else _default_method()
        if method not in _CONTEXTS or (context is not None and type(context) not in _STANDARD):
            logger.warning(
                "DataLoader workers are not protected from signals: the context %r is no standard one. "
                "A SIGTERM to the process group will end them, and the save with them.",
                context,
            )
            return loader
    if method is not None:
        loader.multiprocessing_context = _CONTEXTS[method]
    if not isinstance(loader.worker_init_fn, ImmuneInit):
        loader.worker_init_fn = ImmuneInit(loader.worker_init_fn)
    return loader


class ImmuneInit:
    """A ``worker_init_fn`` that makes the worker take no notice of signals and then runs the one before it. Picklable.

    It works without `protect` too, but then torch cannot end a stuck worker, since that takes SIGTERM.
    """

    def __init__(self, before: Callable[[int], Any] | None = None) -> None:
        self.before = before

    def __call__(self, worker_id: int) -> None:
        # Bytes in the wakeup pipe of a forked parent would be read there as signals to the parent.
        signal.set_wakeup_fd(-1)
        for s in IGNORED:
            # Whatever is there goes: torch's own handler for SIGTERM, or a trainer's that was inherited and would act
            # for the trainer. Not SIG_IGN: programs that the worker starts would inherit that and could not be
            # terminated.
            signal.signal(s, _take_no_notice)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, IGNORED)
        if self.before is not None:
            self.before(worker_id)


def _take_no_notice(signum: int, frame: FrameType | None) -> None:
    """The handler of a protected worker."""


class _Immune(BaseProcess):
    """A process that is born with the signals blocked and is ended over a pipe."""

    def start(self) -> None:
        self._listening, self._speaking = multiprocessing.Pipe(duplex=False)
        # From its first instruction to ImmuneInit, which for a new interpreter takes seconds, the mask protects it.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        try:
            super().start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        self._listening.close()
        _remember(self)

    def run(self) -> None:
        if hasattr(self, "_speaking"):
            self._speaking.close()
        threading.Thread(target=_listen, args=(self._listening,), name="spot-end", daemon=True).start()
        # Where the mask is not inherited (a fork server) it begins here.
        signal.pthread_sigmask(signal.SIG_BLOCK, IGNORED)
        super().run()

    def terminate(self) -> None:
        """End the worker: ask, wait up to 2 s, kill."""
        try:
            self._speaking.send(None)
        except OSError:
            logger.debug("worker %s has closed its pipe", self.name)
        self.join(LISTEN_S)
        if self.is_alive():
            self.kill()

    def __getstate__(self) -> dict[str, Any]:
        # The speaking end stays with the parent: when the parent dies the worker reads the end of the pipe.
        return {name: value for name, value in self.__dict__.items() if name != "_speaking"}


def _listen(connection: Connection) -> None:
    try:
        connection.recv()
    except (EOFError, OSError):
        # The parent is gone, and with it the reason to be.
        logger.debug("the parent has closed the pipe")
    # As torch's own handler for a SIGTERM from the parent does: no error message for an end that was asked for.
    os._exit(0)


class _ForkProcess(_Immune, contexts.ForkProcess):
    """A fork that hangs is made again.

    A lock that another thread held at the moment of the fork stays held in the child. CPython 3.11 waits there for that
    of its thread states before it makes a new one (`PyOS_AfterFork_Child`), and threads of torch (those of a process
    group, of autograd) take it without the interpreter's: the child hangs before its first Python instruction, where
    the trainer would wait for its samples for ever. Nothing of the worker's has run by then.
    """

    _speaking_up: Connection

    @staticmethod
    def _Popen(process: _ForkProcess) -> Any:  # type: ignore[override]
        for _ in range(FORKS):
            listening, process._speaking_up = multiprocessing.Pipe(duplex=False)
            with listening, process._speaking_up:
                popen = contexts.ForkProcess._Popen(process)  # type: ignore[attr-defined]
                # One that ended by itself is the loader's to report.
                if wait([listening, popen.sentinel], FORKED_S):
                    return popen
                popen.kill()
                popen.wait()
            logger.warning(
                "A DataLoader worker (%s) hung in its fork for %.0f s and was killed; forking it again",
                process.name,
                FORKED_S,
            )
        raise SpotError(
            f"No DataLoader worker could be forked: {FORKS} in a row hung before they ran anything.",
            hint="Give the DataLoader multiprocessing_context='forkserver' or 'spawn'.",
        )

    def run(self) -> None:
        with self._speaking_up as word:
            word.send(None)
        super().run()


class _SpawnProcess(_Immune, contexts.SpawnProcess):
    pass


class _ForkServerProcess(_Immune, contexts.ForkServerProcess):
    pass


class _ForkContext(contexts.ForkContext):
    Process = _ForkProcess


class _SpawnContext(contexts.SpawnContext):
    Process = _SpawnProcess


class _ForkServerContext(contexts.ForkServerContext):
    Process = _ForkServerProcess


_CONTEXTS: dict[str, contexts.BaseContext] = {
    "fork": _ForkContext(),
    "spawn": _SpawnContext(),
    "forkserver": _ForkServerContext(),
}
_CONTEXT_TYPES = (_ForkContext, _SpawnContext, _ForkServerContext)
_STANDARD = (contexts.ForkContext, contexts.SpawnContext, contexts.ForkServerContext, contexts.DefaultContext)


def _default_method() -> str:
    """The start method that DataLoader would use, without fixing it for the process."""
    return multiprocessing.get_start_method(allow_none=True) or multiprocessing.get_all_start_methods()[0]


def _remember(process: _Immune) -> None:
    """At the interpreter's end multiprocessing sends SIGTERM to its daemons and waits for them for ever; be quicker."""
    global _owner
    if _owner != os.getpid():
        _owner = os.getpid()
        _started.clear()
        atexit.register(_end_all)
    _started.add(process)


def _end_all() -> None:
    if _owner != os.getpid():
        return
    for process in list(_started):
        if process.is_alive():
            process.terminate()
