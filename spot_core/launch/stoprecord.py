"""The stop record: "life 3 stopped at step 1200, because of SIGTERM"; in the run, and as a note to the launcher.

In the run it is the object `stops/000003.json`, put once by rank 0, after the last save's outcome is known and before
any rank leaves. It says that the life ended in order and may be started again, not that its last save succeeded: what
is committed, the generations say. The note is the same JSON in a local file that the launcher names in
SPOT_STOP_NOTE: it needs no store, no credentials and no URI on the launcher's side.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from spot_core.errors import FormatError, KeyMissingError
from spot_core.layout import stop_key
from spot_core.manifest import FORMAT, decode, encode
from spot_core.store import Store, put_once

STOP_NOTE = "SPOT_STOP_NOTE"  # environment variable: where the launcher looks for the note


@dataclass(frozen=True)
class StopRecord:
    """What a life leaves behind when it stops on request."""

    life: int
    step: int
    """Optimizer steps taken when it stopped."""
    reason: str
    """What asked for the stop, in words."""
    exit_code: int
    """Code that every rank leaves with."""
    created: float = 0.0
    """Unix seconds."""

    def to_json(self) -> bytes:
        return encode({"format": FORMAT, **asdict(self)})

    @classmethod
    def from_json(cls, data: bytes, what: str) -> StopRecord:
        """Read a record; fields that newer releases add are ignored. Raises FormatError, which names `what`."""
        fields: Mapping[str, Any] = decode(data, what)
        try:
            return cls(
                life=int(fields["life"]),
                step=int(fields["step"]),
                reason=str(fields["reason"]),
                exit_code=int(fields["exit_code"]),
                created=float(fields.get("created", 0.0)),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise FormatError(f"{what} is damaged ({error!r}); the run's generations are untouched.") from error


def write_stop(store: Store, record: StopRecord) -> None:
    """Put the record of `record.life`. Raises KeyExistsError when that life said so before, StoreError."""
    put_once(store, stop_key(record.life), record.to_json())


def read_stop(store: Store, life: int) -> StopRecord | None:
    """The stop record of `life`, None when it left none. Raises StoreError, FormatError."""
    try:
        data = store.get(stop_key(life))
    except KeyMissingError:
        return None
    return StopRecord.from_json(data, f"The stop record {stop_key(life)} at {store.uri}")


def leave_note(record: StopRecord, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher of this process, if there is one, that the run has stopped. Every rank calls it, when the
    stop record is in the run: a launcher hears only the ranks of its own machine. Raises OSError.
    """
    if not (name := environ.get(STOP_NOTE)):
        return
    note = Path(name)
    part = note.with_name(f"{note.name}.{os.getpid()}")
    part.write_bytes(record.to_json())
    part.replace(note)  # whole or absent, also when several ranks leave theirs


def read_note(note: Path) -> StopRecord | None:
    """The note the workers left, None when there is none. Raises FormatError, OSError."""
    try:
        return StopRecord.from_json(note.read_bytes(), f"The stop note {note}")
    except FileNotFoundError:
        return None
