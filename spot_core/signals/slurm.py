"""Slurm: the job's time limit, and the way to be queued again. Preemption arrives as SIGTERM."""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import datetime

from spot_core.clock import SYSTEM_CLOCK, Clock
from spot_core.signals.base import BaseSource, LookFailed
from spot_core.signals.context import Context, Plugin
from spot_core.signals.notice import Notice, NoticeKind

logger = logging.getLogger(__name__)

COMMAND_S = 15.0
ASK_AGAIN_S = 300.0
"""The limit can be changed while the job runs; the controller is not asked more often than this."""


def job_id(env: Mapping[str, str]) -> str | None:
    """The id that ``scontrol`` takes: ``JOB``, or ``ARRAY_TASK`` for one task of an array; None outside a job."""
    array, task = env.get("SLURM_ARRAY_JOB_ID"), env.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else env.get("SLURM_JOB_ID") or None


def _run(*command: str) -> str:
    # The format of times is a user setting; ask for the one that is parsed here.
    env = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True, env=env)
    except subprocess.CalledProcessError as error:
        raise LookFailed(f"{' '.join(command)}: {error.stderr.strip() or error}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LookFailed(f"{' '.join(command)}: {error}") from error
    return done.stdout


def _local(text: str) -> float | None:
    """``2025-01-31T12:00:00`` in the local zone as unix seconds; None for ``Unknown``, ``NONE``, ``N/A``."""
    try:
        return datetime.strptime(text, "%Y-%m-%dT%H:%M:%S").astimezone().timestamp()
    except ValueError:
        return None


def end_time(job: str) -> float | None:
    """When the job's time limit ends it, unix seconds; None without a limit. Raises LookFailed."""
    try:
        found = re.search(r"\bEndTime=(\S+)", _run("scontrol", "show", "job", "-o", job))
        if found:
            return _local(found[1])
        raise LookFailed(f"scontrol shows no EndTime for job {job}")
    except LookFailed as first:
        # Some sites keep scontrol from users.
        try:
            return _local(_run("squeue", "-h", "-j", job, "-o", "%e").strip())
        except LookFailed as second:
            raise LookFailed(f"{first}; {second}") from second


def requeue(env: Mapping[str, str] | None = None) -> bool:
    """Ask Slurm to queue this job again; True when it agreed. Never raises.

    Slurm sends SIGTERM to every process of the job at once: call it from one rank, after all have saved.
    """
    job = job_id(os.environ if env is None else env)
    if job is None:
        logger.warning("not in a Slurm job: nothing to requeue")
        return False
    try:
        _run("scontrol", "requeue", job)
    except LookFailed as error:
        logger.error("Slurm did not requeue job %s; submit it again by hand. The run itself is whole. %s", job, error)
        return False
    logger.info("Slurm requeued job %s", job)
    return True


class SlurmTimeLimit(BaseSource):
    """Names the end of the job as soon as it is known; the watcher holds the notice until it is near."""

    name = "slurm"
    backoff_cap_s = ASK_AGAIN_S

    def __init__(
        self, job: str, *, end: float | None = None, clock: Clock = SYSTEM_CLOCK, every_s: float = 15.0
    ) -> None:
        """``end``: unix seconds, from SLURM_JOB_END_TIME (Slurm 23.02 and later); None: ask Slurm."""
        super().__init__(clock=clock)
        self.every_s = every_s
        self._job = job
        self._end = end
        self._asked: float | None = None if end is None else clock.monotonic()

    def describe(self) -> str:
        if self._end is not None:
            return f"job {self._job} ends in {self._end - self._clock.now():.0f} s"
        return f"job {self._job}, {'end time not known yet' if self._asked is None else 'no time limit'}"

    def look(self) -> Iterable[Notice]:
        # What is known is said before Slurm is asked, which may fail.
        if self._end is not None:
            yield self._notice(self._end)
        now = self._clock.monotonic()
        if self._asked is None or now - self._asked >= ASK_AGAIN_S:
            end = end_time(self._job)
            before, self._end, self._asked = self._end, end, now
            if end is not None:
                yield self._notice(end)
            elif before is not None:
                yield self._notice(before).cancelled("the time limit was lifted")

    def _notice(self, end: float) -> Notice:
        return Notice(f"slurm:{self._job}:time-limit", NoticeKind.TIME_LIMIT, self.name, end, "time limit of the job")


def _make(context: Context) -> list[SlurmTimeLimit]:
    job = job_id(context.env)
    if job is None:
        return []
    end = context.env.get("SLURM_JOB_END_TIME", "")
    return [SlurmTimeLimit(job, end=float(end) if end.isdigit() else None, clock=context.clock)]


def _probe(context: Context) -> str | None:
    return job_id(context.env)


PLUGIN = Plugin("slurm", _make, _probe)
