"""How a save ended, as a value that every rank gets, and what a failed one does: counted, or raised."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spot_core import errors
from spot_core.errors import CommitError, FencedError, Reason, SaveError, SpotError
from spot_core.generation import Committed
from spot_core.layout import GenerationId
from spot_core.manifest import Manifest

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """One save's end: `committed`, or `error`. With `local` it stayed at the local tier, which counts for nothing."""

    step: int
    committed: Committed | None = None
    error: SpotError | None = None
    local: bool = False

    def to_json(self) -> dict[str, Any]:
        manifest = None if self.committed is None else dict(self.committed.manifest.to_json())
        return {"step": self.step, "manifest": manifest, "error": error_to_json(self.error), "local": self.local}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Outcome:
        committed = None
        if value["manifest"] is not None:
            manifest = Manifest.from_json(value["manifest"])
            committed = Committed(GenerationId(manifest.life, manifest.step), manifest)
        return cls(value["step"], committed, error_from_json(value["error"]), value["local"])


class Tally:
    """Takes outcomes in order and applies the policy; every rank has one and takes the same ones at the same call."""

    def __init__(self, *, on_save_error: str, max_failed: int, speaks: bool) -> None:
        self._raises = on_save_error == "raise"
        self._max_failed = max_failed
        self._speaks = speaks  # one rank says it
        self.failed_in_a_row = 0
        self.newest: Committed | None = None

    def must_raise(self, outcome: Outcome) -> bool:
        """Whether `take` would raise for this one."""
        if outcome.error is None:
            return False
        return self._raises or isinstance(outcome.error, FencedError) or self.failed_in_a_row >= self._max_failed

    def take(self, outcome: Outcome) -> None:
        """Count it. Raises its error when errors are to be raised, when too many came in a row, or when fenced."""
        if outcome.local:
            return
        if outcome.error is None:
            self.failed_in_a_row = 0
            self.newest = outcome.committed
            return
        raises = self.must_raise(outcome)
        self.failed_in_a_row += 1
        if raises:
            raise outcome.error
        if self._speaks:
            log.warning(
                "spot: the save of step %d failed (%d in a row, %d are borne): %s",
                outcome.step,
                self.failed_in_a_row,
                self._max_failed,
                outcome.error,
            )


def as_commit_error(error: BaseException, what: str) -> SpotError:
    """The error as one of a save: what it is already, or SaveError around it. `what` could not be saved."""
    if isinstance(error, CommitError):
        return error
    text = str(error).rstrip(".")
    wrapped = SaveError(f"{what} could not be saved: {type(error).__name__}: {text}. Earlier generations are whole.")
    wrapped.__cause__ = error
    return wrapped


def error_to_json(error: SpotError | None) -> dict[str, str] | None:
    if error is None:
        return None
    kind = type(error).__name__
    return {"kind": kind, "message": error.message, "reason": error.reason.value, "hint": error.hint}


def error_from_json(value: Mapping[str, str] | None) -> SpotError | None:
    """An error of the same class where it is one of `spot_core.errors`, else a SaveError."""
    if value is None:
        return None
    kind = getattr(errors, value["kind"], SaveError) if value["kind"] in errors.__all__ else SaveError
    made: SpotError = kind(value["message"], reason=Reason(value["reason"]), hint=value["hint"])
    return made
