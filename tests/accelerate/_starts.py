"""Starts of `_script.py` under the launcher's runner, in forked processes: real signals, no ten seconds of imports."""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
import transformers  # noqa: F401 - here once, not in every child: accelerate looks for it
from accelerate.state import AcceleratorState, GradientState

from accelerate_spot import _compat, attaching, job  # noqa: F401 - the same
from accelerate_spot.launch import runner

SCRIPT = Path(__file__).with_name("_script.py")
TIMEOUT_S = 120.0


def start(
    out: Path,
    *options: Any,
    run: Path,
    processes: int = 1,
    interval: str = "3 steps",
    script: Path = SCRIPT,
    environment: dict[str, str] | None = None,
) -> list[int]:
    """One start of the script; the exit codes of its processes (-9: killed)."""
    out.mkdir(parents=True, exist_ok=True)
    arguments = [str(script), "--out", str(out), *map(str, options)]
    base = {
        "ACCELERATE_SPOT_RUN": str(run),
        "ACCELERATE_SPOT_INTERVAL": interval,
        "ACCELERATE_SPOT_SOURCES": "sigterm,sigusr1",
        "ACCELERATE_USE_CPU": "true",
        "OMP_NUM_THREADS": "1",
        **(environment or {}),
    }
    port = _free_port()
    context = multiprocessing.get_context("fork")
    children = []
    for rank in range(processes):
        variables = dict(base)
        if processes > 1:
            variables |= {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(processes),
                "LOCAL_WORLD_SIZE": str(processes),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
        log = out / f"log-rank{rank}.txt"
        children.append(context.Process(target=_child, args=(arguments, variables, log)))
    for child in children:
        child.start()
    codes = []
    for child in children:
        child.join(TIMEOUT_S)
        if child.is_alive():
            child.kill()
            child.join()
            codes.append(None)
        else:
            codes.append(child.exitcode)
        child.close()
    if any(code not in (0, 143, -9) for code in codes):
        logs = "\n".join(path.read_text()[-4000:] for path in sorted(out.glob("log-rank*.txt")))
        raise AssertionError(f"exit codes {codes}\n{logs}")
    return codes


def _child(arguments: list[str], variables: dict[str, str], log: Path) -> None:
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(descriptor, stream)
    sys.stdout = sys.stderr = os.fdopen(descriptor, "w", buffering=1)
    faulthandler.enable(sys.stderr)
    os.environ.update(variables)
    # Other tests of this process may have made accelerators, whose state is the process's.
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.set_num_threads(1)
    atexit._clear()
    sys.path.insert(0, "")  # the runner replaces the first entry
    runner._speak()
    code: Any = 1
    try:
        runner.main(arguments)
        code = 0
    except SystemExit as error:
        code = error.code
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stderr.flush()
        os._exit(code)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
