"""The stop record: "life 3 stopped cleanly at step 1200, because of SIGTERM"; in the run and as a note to the launcher.

In the run it is the object `stops/000003.json`, put once, after every rank's state was committed and before any rank
leaves. The note is the same JSON in a local file that the launcher names in SPOT_STOP_NOTE: it needs no store, no
credentials and no URI on the launcher's side.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spot_core.errors import FormatError, KeyExistsError, KeyMissingError
from spot_core.layout import LIVES, life_of, stop_key

if TYPE_CHECKING:
    from spot_core.store import Store

_log = logging.getLogger(__name__)

STOP_NOTE = "SPOT_STOP_NOTE"  # environment variable: where the launcher looks for the note


@dataclass(frozen=True)
class StopRecord:
    """What a life leaves behind when it stops on request."""

    life: int
    step: int  # optimizer steps that the newest committed generation holds
    reason: str  # what asked for the stop, in words
    exit_code: int  # code that every rank leaves with
    clean: bool = True  # False: the life stopped in order, but the save before the stop did not become whole
    created: float = 0.0  # unix seconds

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), sort_keys=True).encode()

    @classmethod
    def from_json(cls, data: bytes, *, where: str) -> StopRecord:
        """Read a record, ignoring fields of newer releases. Raises FormatError, naming `where` it was found."""
        try:
            fields: Mapping[str, Any] = json.loads(data)
            return cls(
                life=int(fields["life"]),
                step=int(fields["step"]),
                reason=str(fields["reason"]),
                exit_code=int(fields["exit_code"]),
                clean=bool(fields.get("clean", True)),
                created=float(fields.get("created", 0.0)),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise FormatError(
                f"{where} is no stop record ({type(error).__name__}: {error}); the run's generations are untouched."
            ) from error


def write_stop(store: Store, record: StopRecord) -> None:
    """Put the record of `record.life`; the first one stays. Raises StoreError."""
    try:
        store.put_if_absent(stop_key(record.life), record.to_json())
    except KeyExistsError:
        _log.debug("life %d has a stop record already", record.life)


def read_stop(store: Store, life: int) -> StopRecord | None:
    """The stop record of `life`, None when it left none. Raises StoreError, FormatError."""
    try:
        data = store.get(stop_key(life))
    except KeyMissingError:
        return None
    return StopRecord.from_json(data, where=f"{store.uri}/{stop_key(life)}")


def newest_life(store: Store) -> int:
    """Number of the newest claimed life, 0 when the run has none. Raises StoreError."""
    return max((life_of(info.key) or 0 for info in store.list(LIVES)), default=0)


def leave_note(record: StopRecord, environ: Mapping[str, str] = os.environ) -> None:
    """Tell the launcher of this process, if there is one, that the run has stopped. Any rank may call it."""
    if not (name := environ.get(STOP_NOTE)):
        return
    note = Path(name)
    part = note.with_name(f"{note.name}.{os.getpid()}")
    part.write_bytes(record.to_json())
    part.replace(note)  # whole or absent, also when several ranks leave theirs


def read_note(note: Path) -> StopRecord | None:
    """The note the workers left, None when there is none. Raises FormatError."""
    try:
        return StopRecord.from_json(note.read_bytes(), where=str(note))
    except FileNotFoundError:
        return None
