"""Arms ckpt-chaos in the process that CHAOS_ARM names: the trainer ("main") or its writer process ("writer").

ckpt-chaos arms only the first Python process, through a `sitecustomize` of its own; the writer inherits
CKPT_CHAOS_ARMED and is passed over, and then the files that hold the data are never touched. This one stands first on
the path instead. It also shows ckpt-chaos what it cannot see by itself: files made by `os.open` (so that they can be
torn, or lose what was not fsynced) and names made by `os.link`.

A writer that is killed takes its trainer with it, as a machine that dies would.
"""

import os
import signal
import sys
import threading

ARM = os.environ.get("CHAOS_ARM")
CRASH = 137  # the exit code that ckpt-chaos crashes with


def _role() -> str:
    words = sys.orig_argv
    if "spot_core.writer" in words:
        return "writer"
    # Helpers of multiprocessing (data workers, resource trackers) run with -c.
    return "other" if "-c" in words else "main"


def _see_os_open(inject) -> None:
    state, plain_open, plain_fsync, plain_link = inject._state, os.open, os.fsync, os.link
    torn: dict[int, str] = {}

    def open_(path, flags, *args, **kwargs):
        creates = flags & os.O_CREAT and isinstance(path, (str, os.PathLike)) and inject._under(path)
        if not creates:
            with inject._quietly():
                fd = plain_open(path, flags, *args, **kwargs)
            # The number may have belonged to a file before: an fsync of this one says nothing about that.
            state["fd_path"].pop(fd, None)
            torn.pop(fd, None)
            return fd
        folder, name = os.path.split(os.fspath(path))
        # Temporary names hold chance; told by their kind, two runs have the same plan.
        told = os.path.join(folder, ".tmp" if name.startswith(".tmp-") else name)
        tear = inject._event("os.open", told, tornable=True)
        normal = inject._norm(path)
        if state["unsynced"]:
            inject._note_open_for_write(normal)
        with inject._quietly():
            fd = plain_open(path, flags, *args, **kwargs)
        state["fd_path"][fd] = normal
        if tear:
            torn[fd] = normal
        return fd

    def fsync(fd):
        if fd in torn:  # the crash comes before the data is safe: half of it is there
            inject._tear(torn[fd])
            os._exit(CRASH)
        plain_fsync(fd)

    def link(src, dst, *args, **kwargs):
        watched = inject._under(dst)
        if watched:
            inject._event("os.link", dst, tornable=False)
        plain_link(src, dst, *args, **kwargs)
        if watched and inject._norm(src) in state["dirty"]:
            state["dirty"].add(inject._norm(dst))
            state["zero"].add(inject._norm(dst))

    os.open, os.fsync, os.link = open_, fsync, link


def _take_trainer_along(inject) -> None:
    trainer, plain_exit = os.getppid(), os._exit

    def exit_(code):
        if code == CRASH:
            os.kill(trainer, signal.SIGKILL)
        plain_exit(code)

    os._exit = exit_
    # The notice goes to the job; a writer ignores it.
    inject._terminate = lambda: os.kill(trainer, signal.SIGTERM)


def _arm() -> None:
    from ckpt_chaos import inject
    from ckpt_chaos.targets.common import arm_from_env

    if ARM == "writer":
        _take_trainer_along(inject)
    lock, plain_event = threading.RLock(), inject._event

    def event(kind, path, tornable):
        with lock:  # several threads write, and each event has one number; a rollback opens files itself
            return plain_event(kind, path, tornable)

    inject._event = event
    _see_os_open(inject)
    if "CKPT_CHAOS_CRASH_AT" in os.environ:
        # The harness tells only the rank that is to crash where; `arm_from_env` would take rank 0 for that one.
        os.environ["CKPT_CHAOS_CRASH_RANK"] = os.environ.get("RANK", "0")
    arm_from_env(int(os.environ.get("RANK", "0")), lazy=True)


if os.environ.get("CKPT_CHAOS_WATCH") and _role() == ARM:
    _arm()
