"""From what a user writes to a store: the one reading of run URIs."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit

from spot_core.errors import ConfigError
from spot_core.store._base import Store
from spot_core.store._cloud import CloudStore
from spot_core.store._cloud_options import SCHEMES
from spot_core.store._fsspec import FsspecStore
from spot_core.store._local import LocalStore
from spot_core.store._memory import MemoryStore

__all__ = ["mask", "open_store"]

_ACCEPTED = "Give a folder ('/data/runs/a'), or a URI such as 's3://bucket/run', 'gs://bucket/run', 'memory://run'."
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):(//)?")
_PASSWORD = re.compile(r"(://[^/@:\s]*):[^/@\s]*@")


def mask(uri: str) -> str:
    """`uri` with a password in it replaced, for messages."""
    return _PASSWORD.sub(r"\1:***@", uri)


def open_store(uri: str | os.PathLike[str], *, storage_options: Mapping[str, Any] | None = None) -> Store:
    """The store at `uri`. No effect and no I/O: a folder or bucket that is absent shows at the first verb.

    Args:
        uri: a path, or a URI of any file system that fsspec knows.
        storage_options: as s3fs, adlfs or the fsspec file system takes them; never logged. Must be None for a local
            path or ``memory://``.

    Raises:
        ConfigError: no path and no URI, an unknown scheme, a password in the URI, options where none apply.
    """
    text = os.fspath(uri)
    if not isinstance(text, str) or not text.strip() or "\0" in text or text != text.strip():
        raise ConfigError(f"Not a run location: {text!r}.", hint=_ACCEPTED)
    if _PASSWORD.search(text):
        raise ConfigError(
            f"The run URI {mask(text)} holds a password; URIs end up in logs and process lists.",
            hint="Pass it by storage_options or the environment instead.",
        )
    match = _SCHEME.match(text)
    if match is None:
        return _local(text, storage_options)
    scheme = match[1].lower()
    if not match[2]:
        raise ConfigError(f"{text!r} is neither a path nor a URI: '//' is missing after '{scheme}:'.", hint=_ACCEPTED)
    if "::" in text:
        raise ConfigError(f"{text!r} chains file systems; a cache between would show stale listings.", hint=_ACCEPTED)
    if scheme in ("file", "local"):
        parts = urlsplit(text)
        if parts.netloc not in ("", "localhost"):
            raise ConfigError(f"{text!r} names a host; a file URI has three slashes.", hint=_ACCEPTED)
        return _local(unquote(parts.path), storage_options)
    if not text[match.end() :].strip("/"):
        raise ConfigError(f"{text!r} names no place, only a scheme.", hint=_ACCEPTED)
    if scheme == "memory":
        _no_options(text, storage_options)
        return MemoryStore.named(text)
    if scheme in SCHEMES:
        return CloudStore(text, storage_options=storage_options)
    return FsspecStore(text, storage_options=storage_options)


def _local(path: str, storage_options: Mapping[str, Any] | None) -> Store:
    _no_options(path, storage_options)
    if not path:
        raise ConfigError("The run's path is empty.", hint=_ACCEPTED)
    return LocalStore(os.path.expanduser(path))


def _no_options(uri: str, storage_options: Mapping[str, Any] | None) -> None:
    if storage_options:
        # Their names are told, their values never.
        names = ", ".join(sorted(map(str, storage_options)))
        raise ConfigError(f"storage_options ({names}) do not apply to {uri}.")
