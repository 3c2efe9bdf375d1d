"""Slurm: ask that this job is queued again.

Needed where the cluster has no `RequeueExit=` for the exit code of a clean stop: a job that saves and leaves before the
end of the preemption's grace is finished (or failed) to Slurm, and is not started again. Seen with Slurm 22.05.
"""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Mapping

_log = logging.getLogger(__name__)

SCONTROL_TIMEOUT_S = 30.0


def job_to_requeue(environ: Mapping[str, str] = os.environ) -> str | None:
    """The job's id as `scontrol requeue` wants it; None outside a job and in every task but the first.

    An element of an array is named `ARRAY_TASK`: its own SLURM_JOB_ID would do, the array's would requeue them all.
    """
    if environ.get("SLURM_PROCID", "0") != "0" or not (job := environ.get("SLURM_JOB_ID")):
        return None
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else job


def requeue(environ: Mapping[str, str] = os.environ) -> bool:
    """Ask Slurm to queue this job again; True when it agreed.

    Call it once all ranks of the job have saved and are about to leave: Slurm answers by sending SIGTERM to every
    process of the job at once.
    """
    job = job_to_requeue(environ)
    if job is None:
        return False
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job], capture_output=True, text=True, timeout=SCONTROL_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        _log.error("Slurm job %s is not queued again: scontrol requeue: %s", job, error)
        return False
    if done.returncode:
        _log.error("Slurm job %s is not queued again: scontrol requeue: %s", job, done.stderr.strip())
        return False
    _log.info("Slurm job %s is queued again", job)
    return True
