"""A store in this process's memory: for tests, drills and dry runs. It survives nothing."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

from spot_core.errors import KeyExistsError, KeyMissingError, Reason, StoreError
from spot_core.store._base import BlobSource, Capabilities, ObjectInfo, Unfinished, check_key, check_prefix, chunk_count

__all__ = ["MemoryStore"]

# memory:// URIs name process-wide state, as they do in fsspec: two opens of one URI see one store.
_shared: dict[str, dict[str, bytes]] = {}
_lock = threading.Lock()


class MemoryStore:
    """Objects in a dict. `MemoryStore()` is private; `MemoryStore.named(uri)` is shared by URI in this process."""

    def __init__(self, uri: str = "memory://", objects: dict[str, bytes] | None = None) -> None:
        self.uri = uri
        self.storage_options: Mapping[str, Any] = {}
        self.capabilities = Capabilities(put_if_absent=True, reopenable=False)
        self._objects: dict[str, bytes] = {} if objects is None else objects

    @classmethod
    def named(cls, uri: str) -> MemoryStore:
        uri = uri.rstrip("/") if not uri.endswith("://") else uri
        with _lock:
            return cls(uri, _shared.setdefault(uri, {}))

    def put_if_absent(self, key: str, data: bytes) -> None:
        check_key(key)
        with _lock:
            if key in self._objects:
                raise KeyExistsError(f"{key} exists at {self.uri}.")
            self._objects[key] = bytes(data)

    def put(self, key: str, data: bytes) -> None:
        with _lock:
            self._objects[check_key(key)] = bytes(data)

    def put_blob(self, key: str, source: BlobSource) -> None:
        self.put_if_absent(key, b"".join(source.chunk(i) for i in range(chunk_count(source))))

    def get(self, key: str) -> bytes:
        try:
            return self._objects[check_key(key)]
        except KeyError:
            raise KeyMissingError(f"No object {key} at {self.uri}.") from None

    def get_ranges(self, key: str, ranges: Sequence[tuple[int, Sequence[memoryview]]], *, threads: int = 4) -> None:
        data = memoryview(self.get(key))
        for offset, buffers in ranges:
            for buffer in buffers:
                view = buffer.cast("B")
                piece = data[offset : offset + len(view)]
                if len(piece) != len(view):
                    raise StoreError(
                        f"{key} at {self.uri} ends at {len(data)}, before byte {offset + len(view)}.",
                        reason=Reason.TRUNCATED,
                    )
                view[:] = piece
                offset += len(view)

    def stat(self, key: str) -> ObjectInfo | None:
        data = self._objects.get(check_key(key))
        return None if data is None else ObjectInfo(key, len(data), None)

    def list(self, prefix: str, *, recursive: bool = True) -> Sequence[ObjectInfo]:
        check_prefix(prefix)
        with _lock:
            found = sorted((k, len(v)) for k, v in self._objects.items() if k.startswith(prefix))
        return [ObjectInfo(k, size, None) for k, size in found if recursive or "/" not in k[len(prefix) :]]

    def list_dirs(self, prefix: str) -> Sequence[str]:
        rests = (info.key[len(prefix) :] for info in self.list(prefix))
        return sorted({rest.split("/", 1)[0] for rest in rests if "/" in rest})

    def delete(self, key: str) -> None:
        with _lock:
            self._objects.pop(check_key(key), None)

    def unfinished(self, prefix: str) -> Sequence[Unfinished]:
        return ()

    def abort(self, upload: Unfinished) -> None:
        pass

    def __repr__(self) -> str:
        return f"MemoryStore({self.uri!r})"
