"""Becomes a worker that cannot outlive its launcher; run by its path: `python -I -S tether.py <flags> -- command`.

Standard library only and no package import, so that a worker starts a few milliseconds later, not a second.
The process replaces itself with the command: same pid, same group, same exit code as without it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
from pathlib import Path
from typing import NoReturn

PR_SET_PDEATHSIG = 1  # prctl(2), linux/prctl.h
COMMAND_NOT_FOUND = 127  # as a shell says it


def die_with_parent() -> None:
    """Ask the kernel for SIGKILL when the launcher's thread that started this process ends (Linux; prctl(2)).

    SIGKILL, not SIGTERM: with the launcher goes the store over which the ranks agree, so no joint save is possible any
    more, and a worker that lives on would hold the accelerator against the job's next start. Survives execve(2), not
    fork(2): the worker's own children are the worker's affair.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(argv: list[str]) -> NoReturn:
    parser = argparse.ArgumentParser(prog="tether.py")
    parser.add_argument("--launcher", type=int, required=True, help="pid of the launcher")
    parser.add_argument("--stop-note", type=Path, required=True, help="file that a clean stop leaves behind")
    parser.add_argument("--exit-code", type=int, required=True, help="exit code of a clean stop")
    parser.add_argument("--unblock", default="", help="comma-separated numbers of the signals the launcher blocks")
    parser.add_argument("command", nargs="+")
    args = parser.parse_args(argv)

    die_with_parent()
    if os.getppid() != args.launcher:  # it died before the kernel was asked
        sys.exit(f"spot launch: the launcher (pid {args.launcher}) is gone; worker not started")
    if args.stop_note.exists():
        # The agent restarts a failed group, and to it a clean stop is a failure. This machine is about to go:
        # tell the launcher to leave, so that the orchestrator starts the job elsewhere.
        os.kill(args.launcher, signal.SIGTERM)
        sys.exit(args.exit_code)

    # A signal that came since the fork is pending: it shall end this process, as it would end a fresh worker.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {int(number) for number in args.unblock.split(",") if number})
    try:
        os.execvp(args.command[0], args.command)
    except OSError as error:
        sys.stderr.write(f"spot launch: cannot start {args.command[0]!r}: {error.strerror}\n")
        sys.exit(COMMAND_NOT_FOUND)


if __name__ == "__main__":
    main(sys.argv[1:])
