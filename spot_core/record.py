"""The run record `spot.json`: makes a folder a run, and names which run it is."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from spot_core import layout
from spot_core.clock import Clock
from spot_core.errors import ConfigError, FormatError, KeyExistsError, KeyMissingError, Reason
from spot_core.manifest import FORMAT, decode, encode
from spot_core.store import Store, put_once

__all__ = ["RunRecord", "create_record", "read_record"]


@dataclass(frozen=True)
class RunRecord:
    run_id: str
    created: float
    """Unix seconds."""
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        return encode({"format": self.format, "features": [], "run_id": self.run_id, "created": self.created})


def read_record(store: Store) -> RunRecord | None:
    """The run's record, None where there is none.

    Raises:
        ConfigError: there is a `spot.json`, but of something else.
        FormatError: the run was written by a newer release.
        StoreError: it could not be read.
    """
    try:
        data = store.get(layout.RUN_RECORD)
    except KeyMissingError:
        return None
    what = f"The run record {layout.RUN_RECORD} at {store.uri}"
    try:
        value = decode(data, what)
    except FormatError as error:
        if error.hint:  # a newer release wrote it
            raise
        raise _not_a_record(store, what, error) from error
    return _parse(value, store, what)


def _parse(value: Mapping[str, Any], store: Store, what: str) -> RunRecord:
    run_id, created = value.get("run_id"), value.get("created")
    if not isinstance(run_id, str) or not run_id or not isinstance(created, (int, float)):
        raise _not_a_record(store, what, None)
    return RunRecord(run_id=run_id, created=float(created), format=value["format"])


def _not_a_record(store: Store, what: str, why: FormatError | None) -> ConfigError:
    return ConfigError(
        f"{what} is not a run record{f' ({why.message})' if why else ''}: this place belongs to something else.",
        reason=Reason.NOT_A_RUN,
        hint=f"Choose another run location than {store.uri}; nothing was changed there.",
    )


def create_record(store: Store, clock: Clock, run_id: str | None) -> RunRecord:
    """Make the place a run; when another process did so first, theirs holds."""
    mine = RunRecord(run_id=run_id or secrets.token_hex(8), created=clock.now())
    try:
        put_once(store, layout.RUN_RECORD, mine.to_bytes())
    except KeyExistsError:
        theirs = read_record(store)
        if theirs is None:
            raise
        return theirs
    return mine
