"""The digest that GCS keeps of each object (CRC32C, RFC 3720), to be compared with what was sent."""

from __future__ import annotations

import base64

__all__ = ["Crc32c"]


class Crc32c:
    """Of bytes that come one piece after the other. Where google-crc32c is missing `text` is None."""

    def __init__(self) -> None:
        try:
            import google_crc32c
        except ImportError:
            self._extend = None
        else:
            self._extend = google_crc32c.extend
        self._value = 0

    def update(self, data: memoryview) -> None:
        if self._extend is not None:
            self._value = self._extend(self._value, bytes(data))  # it takes no other type

    @property
    def text(self) -> str | None:
        """As GCS spells it: base64 of the big-endian value."""
        return None if self._extend is None else base64.b64encode(self._value.to_bytes(4, "big")).decode()
