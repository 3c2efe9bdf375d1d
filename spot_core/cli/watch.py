"""`spot watch`: the notice sources as a process beside the job, which hears of it by a signal or by a file.

==  ==================================================================
 0  a stopping notice was delivered (with --once: a notice holds)
 2  the call is wrong: no target, an unknown source or signal
 3  with --once: no notice holds
 7  a notice holds and could not be delivered
==  ==================================================================
"""

from __future__ import annotations

import json
import logging
import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import Annotated

import psutil
import typer

from spot_core.errors import ConfigError
from spot_core.signals import Notice, Watcher, sources, write_flag

logger = logging.getLogger(__name__)

DELIVERED = 0
NO_NOTICE = 3
UNDELIVERED = 7
LEAD_S = 180.0

HELP = """Wait for a notice that this machine will be taken, then signal a process or write a flag file.

Signals go out for stopping notices only; the flag file holds the most urgent notice of any kind, as JSON with its
deadline, and goes away when the notice is cancelled. Training reads it with the source file:/path.

Exit codes: 0 delivered, 2 wrong call, 3 no notice (--once), 7 not delivered.

A systemd unit beside a job on a machine of one's own:

\b
  [Unit]
  Description=Tell the training of a spot interruption
  [Service]
  ExecStart=/usr/local/bin/spot watch --pid-file /run/train.pid --signal SIGTERM --follow
  Restart=always
  RestartSec=2
  [Install]
  WantedBy=multi-user.target

A DaemonSet on Kubernetes, where pods mount the same host directory and train with SPOT_FLAG_FILE=/run/spot/notice:

\b
  apiVersion: apps/v1
  kind: DaemonSet
  metadata: {name: spot-watch}
  spec:
    selector: {matchLabels: {app: spot-watch}}
    template:
      metadata: {labels: {app: spot-watch}}
      spec:
        hostNetwork: true   # the metadata service answers one network hop away at most
        containers:
        - name: watch
          image: your-training-image
          command: [spot, watch, --flag-file, /run/spot/notice, --follow]
          volumeMounts: [{name: spot, mountPath: /run/spot}]
        volumes: [{name: spot, hostPath: {path: /run/spot, type: DirectoryOrCreate}}]
"""


class Undelivered(Exception):
    """The target is not there, or may not be reached. The text says which."""


@dataclass(frozen=True)
class Target:
    """Whom to tell. Processes are looked up when there is something to tell: each start writes its pid file anew."""

    pid: int | None = None
    pid_file: Path | None = None
    process_name: str | None = None
    signum: signal.Signals = signal.SIGTERM
    flag_file: Path | None = None

    @property
    def anyone(self) -> bool:
        return any(value is not None for value in (self.pid, self.pid_file, self.process_name, self.flag_file))

    def tell(self, notice: Notice) -> None:
        """Send the signal for a stopping notice. Raises Undelivered."""
        if not notice.stops or (self.pid is None and self.pid_file is None and self.process_name is None):
            return
        pids = self._pids()
        if not pids:
            raise Undelivered(f"no process is named {self.process_name!r}")
        for pid in pids:
            try:
                os.kill(pid, self.signum)
            except (ProcessLookupError, PermissionError) as error:
                raise Undelivered(f"process {pid} cannot be signalled: {error.strerror}") from error
            logger.warning("sent %s to process %d for notice %s", self.signum.name, pid, notice.id)

    def _pids(self) -> list[int]:
        if self.pid is not None:
            return [self.pid]
        if self.pid_file is not None:
            try:
                return [_positive(self.pid_file.read_text(encoding="utf-8").strip())]
            except (OSError, ValueError) as error:
                raise Undelivered(f"{self.pid_file} holds no process id: {error}") from error
        named = (p for p in psutil.process_iter(["name"]) if p.info["name"] == self.process_name)
        return [process.pid for process in named if process.pid != os.getpid()]

    def show(self, notices: Sequence[Notice]) -> None:
        """Make the flag file say what holds now. Raises Undelivered."""
        if self.flag_file is None:
            return
        try:
            if notices:
                # Stopping ones first; within each, current() sorts by deadline.
                write_flag(self.flag_file, min(notices, key=lambda notice: not notice.stops))
            else:
                self.flag_file.unlink(missing_ok=True)
        except OSError as error:
            raise Undelivered(f"{self.flag_file} cannot be written: {error.strerror}") from error


def _positive(text: str) -> int:
    value = int(text)
    if value <= 0:
        # Zero and below address process groups.
        raise ValueError(f"{value} is no process id")
    return value


def watch(
    source: Annotated[str, typer.Option(help="Where to look: auto, or names joined by commas.")] = "auto",
    pid: Annotated[int | None, typer.Option(help="Signal this process.")] = None,
    pid_file: Annotated[Path | None, typer.Option(help="Signal the process whose id this file holds then.")] = None,
    process_name: Annotated[str | None, typer.Option(help="Signal every process of this name.")] = None,
    signal_name: Annotated[str, typer.Option("--signal", help="Which signal.")] = "SIGTERM",
    flag_file: Annotated[Path | None, typer.Option(help="Write the most urgent notice here.")] = None,
    lead: Annotated[float, typer.Option(help="Hold notices with deadlines further away than this, seconds.")] = LEAD_S,
    once: Annotated[bool, typer.Option(help="Look once, print what holds, deliver it, exit.")] = False,
    follow: Annotated[bool, typer.Option(help="Go on after a delivery, also after a failed one.")] = False,
) -> None:
    logging.basicConfig(level=logging.INFO, format="[spot watch] %(message)s")
    target = Target(pid, pid_file, process_name, _signal(signal_name), flag_file)
    if pid is not None and pid <= 0:
        raise ConfigError(f"{pid} is no process id.", hint="Give the id of one process.")
    if not target.anyone and not once:
        raise ConfigError(
            "spot watch has nobody to tell.",
            hint="Give --pid, --pid-file, --process-name or --flag-file, or use --once.",
        )
    found = sources(source, local_rank=0, posix=False)
    if not found:
        logger.warning("no notice source was found on this machine: nothing will ever be announced")
    heard: SimpleQueue[Notice] = SimpleQueue()
    watcher = Watcher(found, horizon_s=lead, on_notice=heard.put)
    raise typer.Exit(_once(watcher, target) if once else _run(watcher, target, heard, follow))


def _signal(name: str) -> signal.Signals:
    full = name.upper() if name.upper().startswith("SIG") else f"SIG{name.upper()}"
    if full not in signal.Signals.__members__:
        raise ConfigError(f"There is no signal {name!r}.", hint="Accepted: SIGTERM, SIGUSR1, SIGUSR2 and the like.")
    return signal.Signals[full]


def _once(watcher: Watcher, target: Target) -> int:
    notices = watcher.poll_once()
    failing = [state for state in watcher.states() if "(failing" in state]
    watcher.close()
    for state in failing:
        logger.error("%s", state)
    for notice in notices:
        typer.echo(json.dumps(notice.to_json()))
    if not notices:
        return NO_NOTICE
    delivered = [_deliver(target, notice, notices) for notice in notices]
    return DELIVERED if all(delivered) else UNDELIVERED


def _run(watcher: Watcher, target: Target, heard: SimpleQueue[Notice], follow: bool) -> int:
    told: set[str] = set()
    with watcher:
        while True:
            notice = heard.get()
            # A deadline that moved is news for the flag file; a process is signalled once.
            repeated = notice.id in told
            delivered = _deliver(target, None if repeated else notice, watcher.current())
            if delivered and notice.stops:
                told.add(notice.id)
            elif not notice.stops:
                told.discard(notice.id)
            if notice.stops and not follow:
                return DELIVERED if delivered else UNDELIVERED


def _deliver(target: Target, notice: Notice | None, current: Sequence[Notice]) -> bool:
    try:
        target.show(current)
        if notice is not None:
            target.tell(notice)
    except Undelivered as error:
        logger.error("the notice was not delivered: %s", error)
        return False
    return True


def register(app: typer.Typer) -> None:
    """Add the command to `app`."""
    app.command("watch", help=HELP)(watch)
