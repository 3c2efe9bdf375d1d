"""The `spot_config:` section: where the run is, how it is saved, and what is done with the script's epoch loop.

Names and values are those of `spot_core.config.Settings`, with `run` and `epoch_loop`. Of one setting, the strongest
of these counts: an argument in the script, ``ACCELERATE_SPOT_<NAME>``, the section (handed to the workers as JSON in
``ACCELERATE_SPOT_CONFIG``), ``SPOT_<NAME>``, the default.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

from spot_core.config import Settings
from spot_core.errors import ConfigError
from spot_core.pytorch.fits import resolve_run

__all__ = ["HANDOVER", "KEYS", "Section"]

KEY = "spot_config"
"""Of accelerate's YAML."""
HANDOVER = "ACCELERATE_SPOT_CONFIG"
"""The variable in which the launcher hands the section to the workers."""
_PREFIX = "ACCELERATE_SPOT_"
_OWN = ("run", "epoch_loop")
_FIELDS = tuple(spec.name for spec in dataclasses.fields(Settings))
_EPOCH_LOOPS = ("rewrite", "off")

KEYS = (*_OWN, *_FIELDS)


@dataclass(frozen=True)
class Section:
    """What is in force, checked."""

    run: str
    """Folder or URI."""
    settings: Settings
    epoch_loop: str = "rewrite"
    """``"rewrite"``: `for epoch in range(...)` of the script is resumed as it stands; ``"off"``: the script says
    `for epoch in accelerate_spot.epochs(...)` itself. Only the launcher's runner can rewrite."""

    @classmethod
    def active(
        cls,
        run: str | os.PathLike[str] | None = None,
        *,
        environ: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Section:
        """From arguments (None: not given) and variables. Raises ConfigError, which names what is wrong."""
        environ = os.environ if environ is None else environ
        values = handed_over(environ)
        general = dict(environ)
        for name in KEYS:
            text = environ.get(f"{_PREFIX}{name.upper()}", "").strip()
            if text and name != "storage_options":
                values.pop(name, None)
                general[f"SPOT_{name.upper()}"] = text
        values |= {name: value for name, value in settings.items() if value is not None}
        if run is None:
            run = values.pop("run", None) or general.get("SPOT_RUN")
        epoch_loop = values.pop("epoch_loop", None) or general.get("SPOT_EPOCH_LOOP") or "rewrite"
        values.pop("run", None)
        if epoch_loop not in _EPOCH_LOOPS:
            raise ConfigError(f"epoch_loop={epoch_loop!r} is not possible: give one of {', '.join(_EPOCH_LOOPS)}.")
        return cls(resolve_run(run or ""), Settings.from_env(general, **values), epoch_loop)


    def export(self, environ: MutableMapping[str, str]) -> None:
        """Set the ``SPOT_<NAME>`` variables: what is started from here, a Trainer's callback too, goes by the same."""
        environ["SPOT_RUN"] = self.run
        for spec in dataclasses.fields(Settings):
            value = getattr(self.settings, spec.name)
            if value is not None and spec.name != "storage_options":
                environ[f"SPOT_{spec.name.upper()}"] = str(value).lower() if isinstance(value, bool) else str(value)


def handed_over(environ: Mapping[str, str]) -> dict[str, Any]:
    """The section that a launcher put into the environment; empty without one."""
    text = environ.get(HANDOVER, "").strip()
    if not text:
        return {}
    try:
        return checked(json.loads(text), HANDOVER)
    except ValueError as error:
        raise ConfigError(f"{HANDOVER} holds no JSON: {error}") from error


def checked(section: Any, where: str) -> dict[str, Any]:
    """A section's values. Raises ConfigError for keys that nobody knows; `where` names the file."""
    if not isinstance(section, Mapping):
        raise ConfigError(f"{KEY} in {where} is no mapping of names to values.", hint="For example: run: /data/runs/a")
    unknown = [str(key) for key in section if key not in KEYS]
    if unknown:
        close = [match for key in unknown for match in difflib.get_close_matches(key, KEYS, 1)]
        meant = f" Did you mean {', '.join(close)}?" if close else ""
        raise ConfigError(
            f"{KEY} in {where} has unknown keys: {', '.join(unknown)}.{meant}", hint=f"It takes: {', '.join(KEYS)}."
        )
    return {key: value for key, value in section.items() if value is not None}
