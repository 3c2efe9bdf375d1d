"""What made a generation, for its manifest: code revision, versions, settings. Never fails, holds no secret."""

from __future__ import annotations

import dataclasses
import logging
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from spot_core.config import Settings

log = logging.getLogger(__name__)

_PACKAGES = ("lightning-spot", "lightning", "pytorch-lightning", "accelerate", "transformers", "numpy")


def describe(settings: Settings) -> dict[str, Any]:
    """JSON for the manifest's meta."""
    values = {
        field.name: getattr(settings, field.name)
        for field in dataclasses.fields(settings)
        if field.repr  # storage options may hold secrets
    }
    return {"code": code_revision(), "versions": versions(), "settings": values}


def versions() -> dict[str, str]:
    found = {"python": platform.python_version(), "torch": torch.__version__}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def code_revision() -> dict[str, Any] | None:
    """Commit of the repository that the running script is in, and whether it was changed; None when there is none."""
    script = getattr(sys.modules.get("__main__"), "__file__", None)
    folder = Path(script).resolve().parent if script else Path.cwd()
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        changed = bool(_git(folder, "status", "--porcelain", "--untracked-files=no"))
    except (OSError, subprocess.SubprocessError) as error:
        log.debug("no code revision: %s", error)
        return None
    return {"commit": commit, "changed": changed}


def _git(folder: Path, *words: str) -> str:
    run = subprocess.run(
        ["git", "-C", str(folder), *words],
        capture_output=True,
        text=True,
        timeout=5,
        check=True,
        stdin=subprocess.DEVNULL,
    )
    return run.stdout.strip()
