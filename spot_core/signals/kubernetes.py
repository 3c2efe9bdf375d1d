"""Kubernetes: no notice of its own (the kubelet sends SIGTERM), but a budget to keep and a place for last words."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from pathlib import Path

logger = logging.getLogger(__name__)

GRACE_ENV = "SPOT_POD_GRACE_S"
ANNOTATION = "spot/grace-s"
PODINFO = Path("/etc/podinfo/annotations")
TERMINATION_LOG = Path("/dev/termination-log")
TERMINATION_LOG_LIMIT = 4096
"""Bytes that the kubelet keeps."""
DEFAULT_GRACE_S = 30.0


def in_pod(env: Mapping[str, str]) -> bool:
    return "KUBERNETES_SERVICE_HOST" in env


def grace_s(env: Mapping[str, str], podinfo: Path = PODINFO) -> float | None:
    """Seconds between SIGTERM and SIGKILL in this pod, None outside a pod.

    The downward API has no field for ``terminationGracePeriodSeconds``; it has annotations. So the number is taken from
    the variable ``SPOT_POD_GRACE_S``, else from the annotation ``spot/grace-s`` in a downward API volume at
    ``/etc/podinfo``, else it is Kubernetes' default of 30. A preStop hook runs inside the period: subtract its time.
    """
    if not in_pod(env):
        return None
    candidates = [env.get(GRACE_ENV, "")]
    try:
        candidates += re.findall(
            rf'^{re.escape(ANNOTATION)}="([^"]*)"', podinfo.read_text(encoding="utf-8"), re.MULTILINE
        )
    except OSError:
        logger.debug("no downward API volume at %s", podinfo)
    for text in candidates:
        try:
            if text and float(text) > 0:
                return float(text)
        except ValueError:
            logger.warning("the pod's grace period %r is not a number of seconds", text)
    return DEFAULT_GRACE_S


def write_termination_log(text: str, path: Path = TERMINATION_LOG) -> bool:
    """Leave ``text`` where ``kubectl describe pod`` shows it; False when there is no such file. Never raises."""
    try:
        # The kubelet mounts the file; where it does not exist nobody would read it.
        with path.open("r+", encoding="utf-8") as log:
            log.truncate()
            log.write(text.encode()[:TERMINATION_LOG_LIMIT].decode(errors="ignore"))
    except OSError as error:
        logger.debug("no termination log at %s: %s", path, error)
        return False
    return True
