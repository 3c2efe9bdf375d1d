"""As much of GCS's JSON API as gcsfs uses, for the sink. It tells no digests, so nobody compares any.

Objects are kept under the names that S3 requests give them: ``/bucket/key``.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import MutableMapping, Sized
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

Reply = tuple[str, str, Any]
"""Status, further header lines, body."""

_WHEN = "2026-01-01T00:00:00.000Z"
_JSON = "Content-Type: application/json\r\n"


class GcsApi:
    """Answers requests over `objects`. `joined` makes one body of several."""

    def __init__(self, objects: MutableMapping[str, Any], joined: Any) -> None:
        self._objects, self._joined = objects, joined
        self._streams: dict[str, tuple[str, list[Sized]]] = {}
        self._numbers = itertools.count()

    @staticmethod
    def serves(target: str) -> bool:
        return target.startswith(("/storage/v1/", "/upload/storage/v1/", "/download/storage/v1/"))

    def answer(self, method: str, target: str, headers: dict[str, str], body: Any) -> Reply:
        parts = urlsplit(target)
        query = {name: values[0] for name, values in parse_qs(parts.query).items()}
        bucket, _, rest = parts.path.split("/storage/v1/b/", 1)[1].partition("/o")
        key = f"/{bucket}/{unquote(rest.lstrip('/'))}"
        if "upload_id" in query:
            return self._block(method, query["upload_id"], headers, body)
        if parts.path.startswith("/upload/"):
            return self._upload(bucket, query, headers, body)
        if method == "POST" and key.endswith("/compose"):
            sources = [f"/{bucket}/{item['name']}" for item in json.loads(bytes(body))["sourceObjects"]]
            return self._made(key.removesuffix("/compose"), self._joined([self._objects[name] for name in sources]))
        if method == "GET" and not rest.strip("/"):
            return self._listing(bucket, query)
        if key not in self._objects:
            return _told("404 Not Found", {"error": {"code": 404, "message": "No such object"}})
        if method == "DELETE":
            del self._objects[key]
            return "204 No Content", "", b""
        if query.get("alt") == "media":
            return self._bytes(key, headers)
        return _told("200 OK", self._info(key))

    def _upload(self, bucket: str, query: dict[str, str], headers: dict[str, str], body: Any) -> Reply:
        if query["uploadType"] == "resumable":
            name = f"s{next(self._numbers)}"
            self._streams[name] = (f"/{bucket}/{query['name']}", [])
            where = f"http://{headers['host']}/upload/storage/v1/b/{quote(bucket)}/o?upload_id={name}"
            return "200 OK", f"Location: {where}\r\n", b""
        # multipart/related: what the object is called, then its bytes.
        boundary = bytes(body).split(b"\n", 1)[0].strip()
        told, data = (part.split(b"\n\n", 1)[1] for part in bytes(body).split(boundary)[1:3])
        key = f"/{bucket}/{json.loads(told)['name']}"
        if query.get("ifGenerationMatch") == "0" and key in self._objects:
            return _told("412 Precondition Failed", {"error": {"code": 412, "message": "conditionNotMet"}})
        return self._made(key, bytearray(data.removesuffix(b"\n")))

    def _block(self, method: str, name: str, headers: dict[str, str], body: Any) -> Reply:
        if method == "DELETE":
            del self._streams[name]
            return "499 Client Closed Request", "", b""
        key, blocks = self._streams[name]
        blocks.append(body)
        total = headers["content-range"].rpartition("/")[2]
        if total == "*" or sum(map(len, blocks)) < int(total):
            return "308 Resume Incomplete", f"Range: bytes=0-{sum(map(len, blocks)) - 1}\r\n", b""
        del self._streams[name]
        return self._made(key, self._joined(blocks))

    def _made(self, key: str, body: Any) -> Reply:
        self._objects[key] = body
        return _told("200 OK", self._info(key))

    def _info(self, key: str) -> dict[str, str]:
        _, bucket, name = key.split("/", 2)
        size = str(len(self._objects[key]))
        return {"name": name, "bucket": bucket, "size": size, "updated": _WHEN, "timeCreated": _WHEN}

    def _bytes(self, key: str, headers: dict[str, str]) -> Reply:
        data = memoryview(self._objects[key])
        found = re.fullmatch(r"bytes=(\d+)-(\d*)", headers.get("range", ""))
        if found is None:
            return "200 OK", "", data
        start, end = int(found[1]), min(int(found[2] or len(data)), len(data) - 1)
        return "206 Partial Content", f"Content-Range: bytes {start}-{end}/{len(data)}\r\n", data[start : end + 1]

    def _listing(self, bucket: str, query: dict[str, str]) -> Reply:
        root, prefix, cut = f"/{bucket}/", query.get("prefix", ""), query.get("delimiter", "")
        keys = [key for key in sorted(self._objects) if key.startswith(root + prefix)]
        names = {key: key[len(root) :] for key in keys}
        below = {
            name[: name.index(cut, len(prefix)) + 1] for name in names.values() if cut and cut in name[len(prefix) :]
        }
        here = [key for key in keys if not any(names[key].startswith(folder) for folder in below)]
        return _told("200 OK", {"items": [self._info(key) for key in here], "prefixes": sorted(below)})


def _told(status: str, body: dict[str, Any]) -> Reply:
    return status, _JSON, json.dumps(body).encode()
