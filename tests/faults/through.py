"""Stores as `open_store` makes them, with what it leaves at its default: how long to try again, how long to wait."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spot_core.store import CloudStore, FsspecStore
from tests.faults.proxy import Answer
from tests.stores.servers import Server


def opened(server: Server, run: str, retry_s: float, **more: Any) -> CloudStore | FsspecStore:
    """`more`: further options of the store."""
    kind = FsspecStore if server.scheme == "gs" else CloudStore
    return kind(server.uri(run), storage_options={**server.options, **more}, retry_s=retry_s)


def impatient(server: Server, seconds: float) -> Mapping[str, Any]:
    """Options with which a request that takes longer is given up."""
    if server.scheme == "s3":
        return {"config_kwargs": {"read_timeout": seconds}}
    return {"requests_timeout" if server.scheme == "gs" else "timeout": seconds}


def expired(server: Server) -> Answer:
    """How it is told there that the credentials are too old."""
    if server.scheme == "gs":
        return Answer(401, "Unauthorized", "Invalid Credentials")
    return Answer(400, "ExpiredToken", "The provided token has expired.")
