"""Which folder a fit (one training of a script) writes to, and whether what lies there is its own.

A script may train several times (folds, tune then train). The first fit of the process uses the run itself, the next
ones `<run>/fit-0001`, `<run>/fit-0002`, ...; a restarted script comes by the same numbers, fits that had finished
return at once, and no fit loads another one's state.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import xxhash

from spot_core.errors import ConfigError, ResumeMismatchError
from spot_core.manifest import Manifest

_returned: dict[str, int] = {}  # of this process, by run: a script's fits are numbered in the order they are called


def resolve_run(run: str | os.PathLike[str] | None) -> str:
    """The run's location from the argument or `SPOT_RUN`. Raises ConfigError when there is none."""
    given = os.environ.get("SPOT_RUN", "") if run is None else os.fspath(run)
    if not given.strip():
        where = "run=... is empty" if run is not None else "neither run=... nor the variable SPOT_RUN is set"
        raise ConfigError(f"No run to save to: {where}.", hint="Give a folder or a URI such as s3://bucket/run1.")
    return given


def location(run: str) -> tuple[str, str]:
    """(URI, name) of the fit that begins now; `returned` moves on to the next."""
    number = _returned.get(run, 0)
    name = f"fit-{number:04d}"
    return (run if number == 0 else f"{run.rstrip('/')}/{name}"), name


def returned(run: str) -> None:
    """Count the fit; one that ended by an exception is not counted: the next call of `fit` takes it up again."""
    _returned[run] = _returned.get(run, 0) + 1


def fingerprint(module: Any) -> str:
    """Digest of names and shapes of a module's state (or of a state dict): equal for every start of the same model.

    `torch.compile` adds a part to the names; it is left out.
    """
    lines = []
    for name, value in (module if isinstance(module, Mapping) else module.state_dict()).items():
        try:
            shape = str(tuple(value.shape))
        except (AttributeError, RuntimeError):  # not a tensor; a lazy module's parameter before its first batch
            shape = "?"
        lines.append(f"{plain_name(name)} {shape}")
    return xxhash.xxh3_128_hexdigest("\n".join(sorted(lines)).encode())


def plain_name(name: str) -> str:
    return name.replace("_orig_mod.", "")


def check_same(manifest: Manifest, uri: str, model: str, adapter: str, writer: str) -> None:
    """Raises ResumeMismatchError when the generation is another model's or not written by `writer`.

    `adapter` is the key in the manifest's meta under which that writer names its model's fingerprint.
    """
    saved = manifest.meta.get(adapter, {})
    if not isinstance(saved, dict) or "model" not in saved:
        raise ResumeMismatchError(
            f"{uri} holds a run that no {writer} wrote.", hint="Give this job a run folder of its own."
        )
    if saved["model"] != model:
        raise ResumeMismatchError(
            f"{uri} holds the run of another model: names or shapes of its state differ from those of "
            f"the module that is about to train (saved {saved['model']}, here {model}). Nothing was changed.",
            hint="Give this job a run folder of its own, or go back to the model of the run.",
        )


def check_folder(run: str, folders: list[str], whose: str, setting: str) -> None:
    """Raises ConfigError when the framework's `whose` (its `setting` names the folder) would write into the run."""
    mine = _plain(run)
    for folder in folders:
        other = _plain(folder)
        if other == mine or other.startswith(f"{mine}/"):
            raise ConfigError(
                f"{whose} writes to {folder}, which is inside the run {run}.",
                hint=f"Give {whose} a {setting} outside of the run: files in it would be taken for parts of it.",
            )


def _plain(location: str) -> str:
    text = location.removeprefix("file://")
    return text.rstrip("/") if "://" in text else os.path.abspath(text)
