"""Settings: values only, checked once, from keywords or ``SPOT_*`` variables. Components are arguments elsewhere."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from spot_core.errors import ConfigError
from spot_core.interval import parse_interval
from spot_core.policy import EXIT_S
from spot_core.retention import Retention

__all__ = ["Settings"]

_WORDS: dict[str, tuple[str, ...]] = {
    "verify": ("digests", "sizes"),
    "writer": ("process", "thread"),
    "on_save_error": ("warn", "raise"),
    "on_resize": ("keep_global_batch", "accept", "refuse"),
}
_TRUE, _FALSE = ("1", "true", "yes", "on"), ("0", "false", "no", "off")
# Exit codes a launcher or a shell reads as something else; each with what it would be taken for.
_TAKEN = {
    0: "success",
    1: "any Python error",
    2: "a usage error",
    126: "a command that cannot run",
    127: "a missing command",
}


@dataclass(frozen=True, kw_only=True)
class Settings:
    """How to save, how long to keep, how to leave. Raises ConfigError naming the field and what it accepts."""

    interval: str = "auto"
    """Time or steps between saves: ``"auto"``, ``"90s"``, ``"10min"``, ``"500 steps"``, ``"lose at most 10min"``."""
    keep: int = 3
    """Newest generations to keep, from 1."""
    keep_every: int | None = None
    """Also keep, for good, the first generation at or after every so many steps."""
    grace_s: float = 30.0
    """Seconds that the platform gives between its notice and the end."""
    window_s: float = 25.0
    """Seconds of the grace that a last save may use; what is left is the margin."""
    exit_code: int = 143
    """Exit code of a run that stopped because it was told to: 3 to 125 or 128 to 255."""
    verify: str = "digests"
    """How a generation is verified before it is loaded: ``"digests"`` or ``"sizes"``."""
    writer: str = "process"
    """Where the bytes are written: ``"process"`` (a helper process) or ``"thread"``."""
    on_save_error: str = "warn"
    """What a failed save does: ``"warn"`` (training goes on, up to `max_failed_saves`) or ``"raise"``."""
    max_failed_saves: int = 3
    """Failed saves in a row that are borne with ``on_save_error="warn"``, from 0."""
    on_resize: str = "keep_global_batch"
    """What a start with another number of ranks does: ``"keep_global_batch"`` (by gradient accumulation), ``"accept"``
    (the global batch changes with the ranks) or ``"refuse"``."""
    allow_pickle: bool = False
    """Whether state that only pickle can express may be saved and loaded (digests are checked before)."""
    sources: str = "auto"
    """Where notices come from: ``"auto"``, ``"none"`` or names joined by commas."""
    local: str | None = None
    """Folder on a fast disk of each machine: generations are committed there at once, and drained to the run behind."""
    max_upload_mb_s: float | None = None
    """Megabytes per second that each rank may send to the run's store; None for as fast as it goes."""
    writers_at_once: int = 0
    """How many ranks write to the run's store at one time; 0: by the world size (all up to 128, then 128)."""
    preflight: bool = True
    """Whether store, room and memory are checked before the first step of each life."""
    storage_options: Mapping[str, Any] | None = field(default=None, repr=False)
    """As the store's client takes them; may hold secrets, so they are shown nowhere. Their variable holds JSON."""

    def __post_init__(self) -> None:
        parse_interval(self.interval)
        Retention(self.keep, self.keep_every)
        for name, words in _WORDS.items():
            value = getattr(self, name)
            if value not in words:
                raise _refused(name, value, f"one of {', '.join(map(repr, words))}")
        for name in ("grace_s", "window_s"):
            object.__setattr__(self, name, _seconds(name, getattr(self, name)))
        if self.window_s <= EXIT_S:
            raise _refused("window_s", self.window_s, f"more than {EXIT_S:g} s: that much is kept free for leaving")
        if self.window_s > self.grace_s:
            raise _refused(
                "window_s", self.window_s, f"at most grace_s ({self.grace_s:g}): a save cannot use more than is given"
            )
        code = self.exit_code
        if not _is_count(code) or code > 255 or code in _TAKEN:
            taken = f" ({code} reads as {_TAKEN[code]})" if code in _TAKEN else ""
            raise _refused("exit_code", code, f"3 to 125 or 128 to 255{taken}")
        if self.local is not None and not _is_folder(self.local):
            raise _refused("local", self.local, "a folder of this machine, such as '/nvme/spot'")
        if self.max_upload_mb_s is not None and not _is_rate(self.max_upload_mb_s):
            raise _refused("max_upload_mb_s", self.max_upload_mb_s, "megabytes per second above 0, or None")
        if not _is_count(self.writers_at_once):
            raise _refused("writers_at_once", self.writers_at_once, "a number of ranks, or 0")
        if not _is_count(self.max_failed_saves):
            raise _refused("max_failed_saves", self.max_failed_saves, "a whole number from 0")
        for name in ("allow_pickle", "preflight"):
            if not isinstance(getattr(self, name), bool):
                raise _refused(name, getattr(self, name), "True or False")
        if not isinstance(self.sources, str) or not all(part.strip() for part in self.sources.split(",")):
            raise _refused("sources", self.sources, "'auto', 'none' or source names joined by commas")
        if self.storage_options is not None and not isinstance(self.storage_options, Mapping):
            raise ConfigError("storage_options must be a mapping of names to values.")

    @property
    def retention(self) -> Retention:
        return Retention(self.keep, self.keep_every)

    @classmethod
    def from_env(cls, environ: Mapping[str, str] | None = None, **keywords: Any) -> Settings:
        """Settings from ``SPOT_<FIELD>`` variables; a keyword that is given (not None) wins over its variable.

        Raises ConfigError naming the variable or keyword.
        """
        environ = os.environ if environ is None else environ
        values = {name: value for name, value in keywords.items() if value is not None}
        for spec in dataclasses.fields(cls):
            text = environ.get(f"SPOT_{spec.name.upper()}", "").strip()
            if spec.name not in values and text:
                values[spec.name] = _parse(spec.name, str(spec.type), text)
        unknown = sorted(values.keys() - {spec.name for spec in dataclasses.fields(cls)})
        if unknown:
            names = ", ".join(spec.name for spec in dataclasses.fields(cls))
            raise ConfigError(f"Unknown setting {', '.join(unknown)}. Settings are: {names}.")
        return cls(**values)


def _parse(name: str, kind: str, text: str) -> object:
    variable = f"SPOT_{name.upper()}"
    if name == "storage_options":
        return _options(variable, text)
    try:
        if kind.startswith("int"):
            return None if text.lower() == "none" and "None" in kind else int(text)
        if kind.startswith("float"):
            return None if text.lower() == "none" and "None" in kind else float(text)
    except ValueError:
        raise ConfigError(f"{variable}={text!r} is not a number.") from None
    if kind == "bool":
        if text.lower() not in _TRUE + _FALSE:
            raise ConfigError(f"{variable}={text!r}: give one of {', '.join(_TRUE + _FALSE)}.")
        return text.lower() in _TRUE
    return text


def _options(variable: str, text: str) -> Mapping[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        # Not a word of what it holds, nor of the parser's error, which repeats some.
        raise ConfigError(f"{variable} holds no JSON object.", hint="""For example: {"endpoint_url": "https://host"}""")
    return value


def _seconds(name: str, value: object) -> float:
    if isinstance(value, timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise _refused(name, value, "seconds above 0")
    return float(value)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_folder(value: object) -> bool:
    return isinstance(value, str) and bool(value.strip()) and "://" not in value


def _is_rate(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0


def _refused(name: str, value: object, accepted: str) -> ConfigError:
    return ConfigError(f"{name}={value!r} is not possible: give {accepted}.")
