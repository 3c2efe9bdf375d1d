"""Any other file system, through fsspec (imported at use)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class FsspecStore:
    """To come."""

    def __init__(self, uri: str, *, storage_options: Mapping[str, Any] | None = None) -> None:
        raise NotImplementedError(uri)
