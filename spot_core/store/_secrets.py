"""Keeping what storage options hold out of every text."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

__all__ = ["scrub"]

# A signature or token in a URL's query (Azure SAS, presigned S3). Nothing else in a query helps to find a fault.
_QUERY = re.compile(r"(https?://[^\s?\"']+)\?[^\s\"']+")
_USER = re.compile(r"(https?://)[^/\s@]+@")
_PUBLIC = {"account_host", "account_name", "endpoint", "endpoint_url", "profile", "project", "region", "region_name"}
"""Options that say where, not who: an error that hides them helps nobody."""


def scrub(text: str, options: Mapping[str, object]) -> str:
    """`text` without any string of `options` long enough to be a secret, and without the queries of URLs."""
    for secret in _strings(options):
        text = text.replace(secret, "***")
    return _USER.sub(r"\1***@", _QUERY.sub(r"\1", text))


def _strings(value: object) -> Iterator[str]:
    if isinstance(value, Mapping):
        for name, item in value.items():
            if name not in _PUBLIC:
                yield from _strings(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _strings(item)
    elif isinstance(value, str) and len(value) >= 4:
        yield value
