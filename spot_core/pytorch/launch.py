"""`spot launch`: torchrun in this process, with the exit code, the signals and the grace put right.

torch's elastic agent does the launching, with its own options, for one process as for many (one path; and at every
size the grace, the stop record and the termination log mean the same). Around it: workers are tied to this process
(`launch.tether`), signals are passed on by `launch.supervisor`, and the exit code is restored by `launch.exit_code`.
"""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed import run as torchrun
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, record

from spot_core.config import Settings
from spot_core.errors import ConfigError
from spot_core.launch import tether
from spot_core.launch.evidence import Witness
from spot_core.launch.exit_code import Evidence, Verdict, verdict
from spot_core.launch.requeue import requeue_after_stop
from spot_core.launch.stoprecord import STOP_NOTE, StopRecord
from spot_core.launch.supervisor import MESSAGES, STOPPING, LauncherSignal, Supervisor
from spot_core.signals.kubernetes import write_termination_log
from spot_core.store import Store, is_reopenable, open_store

_log = logging.getLogger(__name__)

ENV_RUN, ENV_GRACE, ENV_EXIT_CODE = "SPOT_RUN", "SPOT_GRACE_S", "SPOT_EXIT_CODE"
ENV_SHUTDOWN = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
ENV_OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def parser() -> argparse.ArgumentParser:
    """torchrun's own parser with the options of `spot launch` added."""
    # torch's handlers stay as the last resort for signals that no worker can take; older releases ignore the variable.
    os.environ.setdefault("PET_SIGNALS_TO_HANDLE", ",".join(sorted(each.name for each in STOPPING | MESSAGES)))
    options = torchrun.get_args_parser()
    options.prog = "spot launch"
    options.description = (
        "torchrun with its own options, and: the exit code that brings the job back after a clean stop, signals "
        "passed on to the workers, no worker left behind."
    )
    own = options.add_argument_group("spot")
    own.add_argument(
        "--run",
        metavar="URI",
        default=os.environ.get(ENV_RUN),
        help=f"where the run is, to look for its stop record (env {ENV_RUN})",
    )
    own.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help=f"time between the notice and the end of the machine (env {ENV_GRACE}, default {Settings.grace_s:g}); "
        f"workers still there then are killed, unless --shutdown-timeout or {ENV_SHUTDOWN} says otherwise",
    )
    own.add_argument(
        "--exit-code",
        "--exit_code",
        type=int,
        metavar="CODE",
        help=f"exit code of a clean stop (env {ENV_EXIT_CODE}, default {Settings.exit_code}; 85 for HTCondor)",
    )
    own.add_argument(
        "--slurm-requeue",
        "--slurm_requeue",
        action="store_true",
        help="after a clean stop inside a Slurm job, ask for a requeue (where the cluster has no RequeueExit for the "
        "exit code)",
    )
    return options


def launch(argv: Sequence[str], supervisor: Supervisor) -> int:
    """Run torchrun's agent with `argv` and return the exit code for this process.

    Blocks until every worker on this machine has ended. `supervisor` has been started before torch was imported.
    Raises ConfigError and StoreError before anything starts; SystemExit from the option parser (`--help`, wrong
    options).
    """
    return supervise(parser().parse_args(list(argv)), supervisor)


def supervise(args: argparse.Namespace, supervisor: Supervisor) -> int:
    """`launch` for options that are parsed already (`parser` made them, or their defaults)."""
    settings = Settings.from_env(grace_s=args.grace, exit_code=args.exit_code)
    with tempfile.TemporaryDirectory(prefix="spot-launch-") as notes:
        note = Path(notes) / "stop.json"
        witness = Witness(_open_run(args.run), note)
        kill_after_s = _set_environment(args, settings, note)
        supervisor.configure(kill_after_s=kill_after_s, agent_stops_workers=args.max_restarts > 0)
        script = args.training_script
        _tie_workers(args, settings, note, supervisor)
        witness.before()
        supervisor.check()
        failures, report = _run_agent(args, script)
        supervisor.finish()
        evidence, stop = (None, None) if failures == [] else witness.after()
    result = verdict(
        failures,
        evidence=evidence or Evidence.UNKNOWN,
        exit_code=stop.exit_code if stop else settings.exit_code,
        asked_to_stop=supervisor.stop_signal is not None,
    )
    _tell(result, report, stop)
    if result.stopped and args.slurm_requeue:
        requeue_after_stop()
    return result.code


def _open_run(uri: str | None) -> Store | None:
    if not uri:
        return None
    store = open_store(uri)
    if not is_reopenable(store):
        raise ConfigError(
            f"--run {uri}: no other process can open this store, so the launcher cannot read its stop record.",
            hint="Give a folder or an object store, or leave --run out.",
        )
    return store


def _set_environment(args: argparse.Namespace, settings: Settings, note: Path) -> float:
    """Set what workers and agent read from the environment; returns the seconds from a stop signal to SIGKILL."""
    os.environ[ENV_GRACE] = f"{settings.grace_s:g}"
    os.environ[ENV_EXIT_CODE] = str(settings.exit_code)
    os.environ[STOP_NOTE] = str(note)
    if args.run:
        os.environ[ENV_RUN] = args.run
    explicit = getattr(args, "shutdown_timeout", None)
    if explicit is None:
        os.environ.setdefault(ENV_SHUTDOWN, str(math.ceil(settings.grace_s)))
        explicit = int(os.environ[ENV_SHUTDOWN])
    if args.max_restarts > 0 or _agents_may_vary(args.nnodes):
        # Restarted workers otherwise find the store of the attempt before, with its keys: new process groups then
        # meet dead peers and hang (pytorch issues 135712 and 135957), and an agent that joins never learns of it.
        os.environ.setdefault(ENV_OWN_STORE, "1")
    if args.max_restarts > 0:
        _log.warning(
            "--max-restarts %d: workers that crash are restarted on this machine, also when it is about to go; on "
            "spot machines let the orchestrator restart the job.",
            args.max_restarts,
        )
    return float(explicit)


def _agents_may_vary(nnodes: str) -> bool:
    try:
        fewest, most = torchrun.parse_min_max_nnodes(nnodes)
    except (ValueError, RuntimeError) as error:
        raise ConfigError(f"--nnodes {nnodes}: neither a number nor MIN:MAX.", hint="Give e.g. 2, or 1:2.") from error
    return bool(fewest < most)


def _tie_workers(args: argparse.Namespace, settings: Settings, note: Path, supervisor: Supervisor) -> None:
    """Put `tether.py` in front of the workers' command line, which is built here as torchrun would build it."""
    if args.run_path:
        raise ConfigError(
            "--run-path runs the script in a process that torch forks or spawns itself, which cannot be tied to the "
            "launcher.",
            hint="Leave it out: the script then runs as `python script.py`.",
        )
    if args.no_python and args.module:
        raise ConfigError("--no-python and --module exclude each other.")
    python = os.environ.get("PYTHON_EXEC", sys.executable)
    prefix = [] if args.no_python else [python, "-u", *(["-m"] if args.module else [])]
    command = [*prefix, args.training_script, *args.training_script_args]
    args.training_script = sys.executable
    args.no_python, args.module = True, False
    args.training_script_args = [
        *("-I", "-S", str(Path(tether.__file__).resolve())),
        *("--launcher", str(os.getpid())),
        *("--stop-note", str(note)),
        *("--exit-code", str(settings.exit_code)),
        *("--unblock", ",".join(str(int(each)) for each in sorted(supervisor.blocked))),
        *("--", *command),
    ]


def _run_agent(args: argparse.Namespace, script: str) -> tuple[list[int] | None, str]:
    """Workers' failures as `exit_code.verdict` wants them, and what the agent has to say about them."""
    try:
        record(torchrun.run)(args)
    except ChildFailedError as error:
        by_time = sorted(error.failures.values(), key=lambda failure: failure.timestamp)
        report = str(ChildFailedError(script, error.failures))  # under the script's name, not the tether's
        return [failure.exitcode for failure in by_time], report
    except (SignalException, LauncherSignal) as error:
        return None, str(error)
    except Exception as error:  # noqa: BLE001 - a lost rendezvous has many classes; all end here: reported, exit code 1
        _log.warning("torch's agent ended early", exc_info=True)
        return None, f"{type(error).__name__}: {error}"
    return [], ""


def _tell(result: Verdict, report: str, stop: StopRecord | None) -> None:
    if result.stopped:
        where = f" at step {stop.step} ({stop.reason})" if stop else ""
        _log.warning("Stopped cleanly%s: exit code %d asks for a new start", where, result.code)
    elif result.code:
        _log.error("%s\nExit code %d: %s", report, result.code, result.why)
    if result.stopped and stop is not None:
        write_termination_log(stop.to_json().decode())
