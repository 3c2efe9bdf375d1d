"""Every error of the package, grouped by what its handler will do.

::

    SpotError                     .reason: Reason, .hint: str
      ConfigError (ValueError)      fix the call
      StoreError (OSError)          the environment: fix it or try again
        TransientStoreError           may pass; was retried until the deadline
        AccessError                   this identity may not do that
        KeyExistsError                the name is taken
        KeyMissingError               the name holds nothing
      CommitError                   this generation failed; the previous one is whole
        FencedError                   superseded by a newer life: stop writing
        DeadlineError                 no time left
        SaveError                     the data could not be written or is incomplete
      RestoreError                  this generation is of no use: try the next older
        NoGenerationError (LookupError)
        TornGenerationError           marker without all objects
        CorruptShardError             an object's bytes are not those that were written
        FormatError                   written by a newer release, or no manifest at all
        TopologyError                 cannot be loaded at this world size
      ResumeMismatchError           loaded, but validation says it is not the same run: stop

A message says what, where (URI, generation, rank), what is still safe; the hint says what to do.
`reason` is a stable code to match on; codes are only ever added. Messages are not API.
"""

from __future__ import annotations

import enum

__all__ = [
    "AccessError",
    "CommitError",
    "ConfigError",
    "CorruptShardError",
    "DeadlineError",
    "FencedError",
    "FormatError",
    "KeyExistsError",
    "KeyMissingError",
    "NoGenerationError",
    "Reason",
    "RestoreError",
    "ResumeMismatchError",
    "SaveError",
    "SpotError",
    "StoreError",
    "TopologyError",
    "TornGenerationError",
    "TransientStoreError",
]


class Reason(str, enum.Enum):
    """Stable codes; only ever added to."""

    UNSPECIFIED = "unspecified"
    CONFIG = "config"
    NOT_A_RUN = "not_a_run"
    FOREIGN_RUN = "foreign_run"
    STORE = "store"
    TRANSIENT = "transient"
    ACCESS = "access"
    NO_SPACE = "no_space"
    TRUNCATED = "truncated"
    CAPABILITY = "capability"
    KEY_EXISTS = "key_exists"
    KEY_MISSING = "key_missing"
    COMMIT = "commit"
    UNKNOWN_OUTCOME = "unknown_outcome"
    FENCED = "fenced"
    PRUNED = "pruned"
    DEADLINE = "deadline"
    SAVE = "save"
    MISSING_RANKS = "missing_ranks"
    STEP_ORDER = "step_order"
    RESTORE = "restore"
    NO_GENERATION = "no_generation"
    ALL_DAMAGED = "all_damaged"
    TORN = "torn"
    CORRUPT = "corrupt"
    FORMAT = "format"
    TOPOLOGY = "topology"
    MISMATCH = "mismatch"


class SpotError(Exception):
    """Base of all errors of this package.

    Picklable, so that a writer process can hand its failure to the trainer.
    """

    default_reason: Reason = Reason.UNSPECIFIED

    def __init__(self, message: str = "", *, reason: Reason | None = None, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason: Reason = self.default_reason if reason is None else reason
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} {self.hint}" if self.hint else self.message


class ConfigError(SpotError, ValueError):
    default_reason = Reason.CONFIG


class StoreError(SpotError, OSError):
    default_reason = Reason.STORE


class TransientStoreError(StoreError):
    default_reason = Reason.TRANSIENT


class AccessError(StoreError):
    default_reason = Reason.ACCESS


class KeyExistsError(StoreError):
    default_reason = Reason.KEY_EXISTS


class KeyMissingError(StoreError):
    default_reason = Reason.KEY_MISSING


class CommitError(SpotError):
    default_reason = Reason.COMMIT


class FencedError(CommitError):
    default_reason = Reason.FENCED


class DeadlineError(CommitError):
    default_reason = Reason.DEADLINE


class SaveError(CommitError):
    default_reason = Reason.SAVE


class RestoreError(SpotError):
    default_reason = Reason.RESTORE


class NoGenerationError(RestoreError, LookupError):
    default_reason = Reason.NO_GENERATION


class TornGenerationError(RestoreError):
    default_reason = Reason.TORN


class CorruptShardError(RestoreError):
    default_reason = Reason.CORRUPT


class FormatError(RestoreError):
    default_reason = Reason.FORMAT


class TopologyError(RestoreError):
    default_reason = Reason.TOPOLOGY


class ResumeMismatchError(SpotError):
    default_reason = Reason.MISMATCH
