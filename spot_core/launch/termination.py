"""Kubernetes' termination log: what the pod's status says about why its container ended.

Protocol: https://kubernetes.io/docs/tasks/debug/debug-application/determine-reason-pod-failure/ ; the kubelet puts the
file into the container, reads it when the container has ended, and cuts it at 4096 bytes.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from spot_core.launch.stoprecord import StopRecord

_log = logging.getLogger(__name__)

DEFAULT_PATH = Path("/dev/termination-log")
ENV_PATH = "SPOT_TERMINATION_LOG"  # for pods that set terminationMessagePath


def write_termination_log(record: StopRecord, path: Path | None = None) -> bool:
    """Write `record` as one line of JSON to the termination log; False when there is none (not in a pod).

    The file is never created: outside a container it would be an ordinary file in /dev.
    """
    path = path or Path(os.environ.get(ENV_PATH, DEFAULT_PATH))
    try:
        with path.open("r+b") as log:
            log.truncate()
            log.write(record.to_json() + b"\n")
    except FileNotFoundError:
        return False
    except OSError as error:
        _log.warning("The termination log %s cannot be written: %s", path, error)
        return False
    return True
