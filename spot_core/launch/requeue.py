"""Asks Slurm to queue the job again after a clean stop, unless somebody has cancelled it.

Needed where the cluster has no `RequeueExit=` for the exit code: a job that leaves before the end of the preemption's
grace is finished to Slurm, and does not come back.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
from collections.abc import Mapping

from spot_core.signals.slurm import COMMAND_S, job_id, requeue

_log = logging.getLogger(__name__)


def requeue_after_stop(env: Mapping[str, str] = os.environ) -> bool:
    """Ask for a requeue from the job's first task; True when Slurm agreed. Never raises.

    All ranks of the job must have saved: Slurm sends SIGTERM to all its processes at once. Slurm also requeues a job
    that was cancelled when it is asked to (seen with 22.05), hence the look first.
    """
    job = job_id(env)
    if job is None or env.get("SLURM_PROCID", "0") != "0":
        return False
    if is_ending(_show(job)):
        _log.warning("Slurm job %s was cancelled or requeued by somebody else: not asking for a requeue", job)
        return False
    return requeue(env)


def is_ending(shown: str) -> bool:
    """Whether `scontrol show job -o` says that Slurm itself ends the job, for another reason than its time limit.

    During a preemption's grace, and after a signal before the time limit, the job is RUNNING. A cancelled one is
    COMPLETING without a reason, a requeued one COMPLETING or PENDING. An empty text (scontrol failed) is no proof.
    """
    state = re.search(r"\bJobState=(\w+)", shown)
    reason = re.search(r"\bReason=(\w+)", shown)
    return state is not None and state[1] != "RUNNING" and (reason is None or reason[1] != "TimeLimit")


def _show(job: str) -> str:
    try:
        command = ["scontrol", "show", "job", "-o", job]
        return subprocess.run(command, capture_output=True, text=True, timeout=COMMAND_S, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        _log.warning("The state of Slurm job %s cannot be read: %s", job, error)
        return ""
